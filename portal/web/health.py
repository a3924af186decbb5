"""For a supervisor or a load balancer: is the process alive, and could it serve a request right now?"""

import logging
from collections.abc import Callable

from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from portal.services import broker, ingest

INGEST_LAG_LIMIT_S = 15.0
log = logging.getLogger(__name__)


@never_cache
@require_safe
def healthz(request: HttpRequest) -> JsonResponse:  # noqa: ARG001
    """Alive: touches nothing that could be down."""
    return JsonResponse({"status": "alive"})


@never_cache
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:  # noqa: ARG001
    state = {"database": checked("database", ask_database), "broker": checked("broker", ask_broker)}
    up = all(part["ok"] for part in state.values())
    state["ingest"] = ingest_state() if up else {"ok": False, "lag_s": None, "problem": "Not known: see above."}
    ready = all(part["ok"] for part in state.values())
    return JsonResponse({"ready": ready, **state}, status=200 if ready else 503)


def checked(name: str, ask: Callable[[], None]) -> dict[str, object]:
    try:
        ask()
    except Exception as error:  # whatever it is, the answer is «not ready»; the detail may hold addresses
        log.warning("the %s does not answer: %s", name, error)
        return {"ok": False, "problem": f"The {name} does not answer ({type(error).__name__}). The log has the detail."}
    return {"ok": True}


def ask_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def ask_broker() -> None:
    broker.client().ping()


def ingest_state() -> dict[str, object]:
    lag_s = ingest.lag_s()
    if lag_s is None:
        return {"ok": False, "lag_s": None, "problem": "Nothing is known of ingest. Start `manage.py ingest`."}
    if lag_s > INGEST_LAG_LIMIT_S:
        return {"ok": False, "lag_s": lag_s, "problem": f"Ingest is {lag_s:.0f} s behind. Is it running?"}
    return {"ok": True, "lag_s": lag_s}
