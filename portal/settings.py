"""Settings of the control plane: environment in, typed values out. A wrong value stops the start and names its key."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.templatetags.static import static

BASE_DIR = Path(__file__).resolve().parent.parent


def _env(key: str, default: str = "") -> str:
    return os.environ.get(key, "").strip() or default


def _flag(key: str, default: bool) -> bool:
    text = _env(key, "1" if default else "0").lower()
    if text not in {"1", "0", "true", "false", "yes", "no"}:
        raise ImproperlyConfigured(f"{key}={text!r} is neither yes nor no. Write 1 or 0.")
    return text in {"1", "true", "yes"}


def _number(key: str, default: float, *, least: float = 0) -> float:
    text = _env(key, str(default))
    try:
        value = float(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"{key}={text!r} is not a number.") from error
    if not value >= least:
        raise ImproperlyConfigured(f"{key}={text} is too small: at least {least:g}.")
    return value


def _choice(key: str, default: str, *choices: str) -> str:
    text = _env(key, default).lower()
    if text not in choices:
        raise ImproperlyConfigured(f"{key}={text!r} is not known. Write one of: {', '.join(choices)}.")
    return text


def _database(key: str) -> dict[str, object]:
    url = _env(key)
    if not url:
        raise ImproperlyConfigured(
            f"{key} is not set. `make up` starts a PostgreSQL of its own; else set {key}=postgresql://user:pw@host/name."
        )
    parts = urlsplit(url)
    if parts.scheme not in {"postgres", "postgresql"}:
        raise ImproperlyConfigured(f"{key} is a {parts.scheme or 'nameless'} address; only postgresql:// is supported.")
    query = dict(pair.partition("=")[::2] for pair in parts.query.split("&") if pair)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(query.get("host", "")) or parts.hostname or "",
        "PORT": str(parts.port or ""),
        # Under ASGI a persistent connection would belong to a thread that is gone; the pool keeps them instead.
        "CONN_MAX_AGE": 0,
        # After a restart of the database every pooled connection is dead: look before one is lent out.
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            # A pool that tries again ever more rarely would be away for minutes after the database is back.
            "pool": {
                "min_size": 1,
                "max_size": int(_number("GPUYARD_DB_POOL", 8, least=1)),
                "timeout": 3,
                "reconnect_timeout": 2,
            },
            "connect_timeout": 3,
            "options": "-c statement_timeout=5000 -c lock_timeout=4000",
        },
        "TEST": {"NAME": _env("GPUYARD_TEST_DB", "test_gpuyard")},
    }


def _secret(path: Path) -> str:
    """The secret key: from the environment, else from a file that the first start makes (0600)."""
    given = _env("GPUYARD_SECRET_KEY")
    if given:
        return given
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text()
    with os.fdopen(handle, "w") as file:
        file.write(os.urandom(48).hex())
    return path.read_text()


def _long_secret(key: str) -> str:
    """Optional; a short one could be guessed."""
    text = _env(key)
    if text and len(text) < 16:
        raise ImproperlyConfigured(f"{key} is too short: at least 16 characters, such as `openssl rand -hex 24` makes.")
    return text


# --- where things lie -------------------------------------------------------------------------------------------------
STATE_DIR = Path(_env("GPUYARD_STATE_DIR", str(BASE_DIR / "var"))).resolve()
LOG_ROOT = STATE_DIR / "logs"  # {attempt}/{stream}.log, written by ingest alone
SIGNING_KEY_FILE = STATE_DIR / "portal.key"  # Ed25519, 32 raw bytes, 0600
REDIS_URL = _env("REDIS_URL", "redis://127.0.0.1:6379/0")
NODE_REDIS_URL = _env("GPUYARD_NODE_REDIS_URL", REDIS_URL)  # the address that nodes are told, without credentials
PUBLIC_URL = _env("GPUYARD_PUBLIC_URL", "http://127.0.0.1:8000")

# --- what is promised, in seconds -------------------------------------------------------------------------------------
HEARTBEAT_EXPECTED_S = 5.0
NODE_SUSPECT_AFTER_S = _number("GPUYARD_NODE_SUSPECT_AFTER_S", 15)
NODE_UNREACHABLE_AFTER_S = _number("GPUYARD_NODE_UNREACHABLE_AFTER_S", 30)
DESIRED_REPUBLISH_S = _number("GPUYARD_DESIRED_REPUBLISH_S", 2)
CYCLE_S = _number("GPUYARD_CYCLE_S", 2)  # the scheduler also runs at once when something changed
FOREIGN_POLICY = _choice("GPUYARD_FOREIGN_POLICY", "warn", "off", "warn", "stop")  # processes that belong to no job
FOREIGN_GRACE_S = _number("GPUYARD_FOREIGN_GRACE_S", 300)  # before such a process is ended, under the policy «stop»
BROKER_TIMEOUT_S = 2.0

# --- limits on what people send -------------------------------------------------------------------------------------
MAX_BODY_BYTES = 1024 * 1024
DATA_UPLOAD_MAX_MEMORY_SIZE = MAX_BODY_BYTES
DATA_UPLOAD_MAX_NUMBER_FIELDS = 500
MAX_PENDING_JOBS_PER_USER = int(_number("GPUYARD_MAX_PENDING_JOBS_PER_USER", 10_000))
PAGE_LIMIT = 200

METRICS_TOKEN = _long_secret("GPUYARD_METRICS_TOKEN")  # for /metrics; an admin's token opens it as well

# --- Django ------------------------------------------------------------------------------------------------------
DEBUG = False
SECRET_KEY = _secret(STATE_DIR / "secret.key")
ALLOWED_HOSTS = [host for host in _env("GPUYARD_ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]").split(",") if host]
CSRF_TRUSTED_ORIGINS = [origin for origin in _env("GPUYARD_TRUSTED_ORIGINS").split(",") if origin]
ROOT_URLCONF = "portal.urls"
ASGI_APPLICATION = "portal.asgi.application"
AUTH_USER_MODEL = "portal.User"
SITE_URL = PUBLIC_URL

INSTALLED_APPS = [
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "ninja",
    "django_htmx",
    "allauth",
    "allauth.account",
    "portal",
]
MIDDLEWARE = [
    "portal.web.middleware.security_headers",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "portal.web.middleware.body_limit",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "portal.web.middleware.page_context",
            ],
        },
    }
]
DATABASES = {"default": _database("DATABASE_URL")}
AUTHENTICATION_BACKENDS = [
    "django.contrib.auth.backends.ModelBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
CSRF_FAILURE_VIEW = "portal.web.problems.csrf_failed"
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/login/"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "email", "password1*", "password2*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_SESSION_REMEMBER = True  # for SESSION_COOKIE_AGE, two weeks
ACCOUNT_ADAPTER = "portal.web.accounts.AccountAdapter"
ACCOUNT_RATE_LIMITS = {"login_failed": "10/15m/ip,10/15m/key"}
SIGNUP_OPEN = _flag("GPUYARD_SIGNUP", False)  # the very first account may always be made

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "/static/"
STATIC_ROOT = STATE_DIR / "static"
STATICFILES_DIRS = [BASE_DIR / "static", ("vendor", BASE_DIR / "node_modules" / ".gpuyard-vendor")]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "portal.web.assets.Assets"},
}

SECURE = PUBLIC_URL.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_HSTS_SECONDS = 31_536_000 if SECURE else 0
if _flag("GPUYARD_BEHIND_PROXY", False):
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
X_FRAME_OPTIONS = "DENY"

CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "cache",
        "OPTIONS": {"socket_timeout": BROKER_TIMEOUT_S, "socket_connect_timeout": BROKER_TIMEOUT_S},
    }
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": _env("GPUYARD_LOG_LEVEL", "INFO")},
    "loggers": {
        "httpx": {"level": "WARNING"},
        "django.request": {"level": "ERROR"},
        # One line per tick of the control worker would bury the others.
        "celery.beat": {"level": "WARNING"},
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.app.trace": {"level": "WARNING"},
    },
}
UNFOLD = {
    "SITE_TITLE": "gpuyard",
    "SITE_HEADER": "gpuyard console",
    "SITE_URL": "/",
    "SITE_ICON": lambda request: static("logo.svg"),  # noqa: ARG005
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("logo.svg")}],  # noqa: ARG005
    "COLORS": {
        "primary": {
            "50": "239 245 255",
            "100": "219 232 254",
            "200": "190 215 253",
            "300": "147 189 250",
            "400": "96 153 245",
            "500": "53 117 235",
            "600": "27 94 214",
            "700": "23 77 178",
            "800": "25 66 144",
            "900": "27 57 115",
            "950": "18 37 74",
        },
    },
}
