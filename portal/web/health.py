"""For a supervisor or a load balancer: is the process alive, and could it serve a request right now?"""

from collections.abc import Callable

import redis
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from portal.services import broker, ingest

INGEST_LAG_LIMIT_S = 15.0


@never_cache
@require_safe
def healthz(request: HttpRequest) -> JsonResponse:  # noqa: ARG001
    """Alive: touches nothing that could be down."""
    return JsonResponse({"status": "alive"})


@never_cache
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:  # noqa: ARG001
    database, broker = checked(ask_database), checked(ask_broker)
    lag_s = ingest_lag_s() if broker["ok"] and database["ok"] else None
    reading = {"ok": lag_s is not None and lag_s <= INGEST_LAG_LIMIT_S, "lag_s": lag_s}
    if not reading["ok"]:
        reading["problem"] = NO_INGEST if lag_s is None else f"Ingest is {lag_s:.0f} s behind. Is it running?"
    ready = bool(database["ok"] and broker["ok"] and reading["ok"])
    body = {"ready": ready, "database": database, "broker": broker, "ingest": reading}
    return JsonResponse(body, status=200 if ready else 503)


NO_INGEST = "Nothing is known of ingest. Start `manage.py ingest`."


def checked(ask: Callable[[], None]) -> dict[str, object]:
    try:
        ask()
    except Exception as error:  # whatever it is, the answer is «not ready», with its name
        detail = (str(error).splitlines() or ["no detail"])[0]
        return {"ok": False, "problem": f"{type(error).__name__}: {detail}"}
    return {"ok": True}


def ask_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def ask_broker() -> None:
    broker.client().ping()


def ingest_lag_s() -> float | None:
    try:
        return ingest.lag_s()
    except (redis.RedisError, OSError):
        return None
