"""Where the portal is and who we are: the environment first, then what `gpuyard login` stored."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from client.errors import ClientError, NotConfigured

URL_VARIABLE, TOKEN_VARIABLE = "GPUYARD_URL", "GPUYARD_TOKEN"


@dataclass(frozen=True)
class Config:
    url: str
    token: str


def load(env: Mapping[str, str] | None = None) -> Config:
    env = os.environ if env is None else env
    stored = read(path(env))
    url = env.get(URL_VARIABLE) or stored.get("url", "")
    token = env.get(TOKEN_VARIABLE) or (stored.get("token", "") if url == stored.get("url") else "")
    if not url or not token:
        missing = URL_VARIABLE if not url else TOKEN_VARIABLE
        raise NotConfigured(f"You are not signed in: run `gpuyard login`, or set {missing}.")
    return Config(checked_url(url), token)


def store(config: Config, env: Mapping[str, str] | None = None) -> Path:
    """Readable by its owner from the first byte on."""
    where = path(os.environ if env is None else env)
    try:
        where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = where.with_name(f"{where.name}.new")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": config.url, "token": config.token}, file, indent=2)
        draft.replace(where)
    except OSError as error:
        raise ClientError(
            f"{where} cannot be written ({error.strerror}); use {URL_VARIABLE} and {TOKEN_VARIABLE}."
        ) from error
    return where


def path(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".config")
    return Path(base) / "gpuyard" / "config.json"


def read(where: Path) -> dict[str, str]:
    try:
        data = json.loads(where.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ClientError(f"{where} cannot be read ({error}); run `gpuyard login` to write it anew.") from error
    if not isinstance(data, dict):
        raise ClientError(f"{where} holds no JSON object; run `gpuyard login` to write it anew.")
    return {key: str(value) for key, value in data.items()}


def checked_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ClientError(f"{text!r} is not the address of a portal; it begins with http:// or https://.")
    return text.rstrip("/")
