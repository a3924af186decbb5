"""`/metrics`: what Prometheus reads. For an admin's token, or the one that was set for monitoring."""

import hmac

from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from psycopg_pool import PoolTimeout

from portal.api.problems import respond
from portal.services import exposition, tokens
from portal.services.errors import Problem

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NO_ENTRY = Problem(
    401, "not_authenticated", "Send an admin's token, or that of GPUYARD_METRICS_TOKEN: Authorization: Bearer …",
    headers={"WWW-Authenticate": 'Bearer realm="gpuyard"'},
)  # fmt: skip
NO_DATABASE = Problem(
    503, "database_unavailable", "The portal cannot reach its database. Try again in a few seconds.",
    headers={"Retry-After": "5"},
)  # fmt: skip


@require_safe
def prometheus(request: HttpRequest) -> HttpResponse:
    """All of it, or with ?node=NAME one node's GPUs."""
    try:
        if not may_read(request.headers.get("Authorization", "")):
            return respond(request, NO_ENTRY)
        body = exposition.text(node=request.GET.get("node"))
    except (OperationalError, InterfaceError, PoolTimeout):
        return respond(request, NO_DATABASE)
    return HttpResponse(body, content_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})


def may_read(authorization: str) -> bool:
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        return False
    if settings.METRICS_TOKEN and hmac.compare_digest(token.encode(), settings.METRICS_TOKEN.encode()):
        return True
    user = tokens.user_for(token)
    return user is not None and user.is_superuser
