"""What every request passes: headers against foreign scripts, a request id, a limit on bodies, what the shell shows."""

import re
import uuid
from collections.abc import Awaitable, Callable

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import reverse
from django.utils.decorators import sync_and_async_middleware
from django.utils.translation import gettext_lazy as _

from portal.web.limits import too_large_body

Handler = Callable[[HttpRequest], HttpResponseBase]
AsyncHandler = Callable[[HttpRequest], Awaitable[HttpResponseBase]]

OWN = (
    "default-src 'self'",
    "style-src 'self' 'unsafe-inline'",
    "img-src 'self' data:",
    "font-src 'self'",
    "connect-src 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'self'",
)
PAGES = "; ".join(OWN)
# The admin console's widgets evaluate expressions in the page; only staff reach it, and still nothing foreign loads.
CONSOLE = "; ".join((*OWN, "script-src 'self' 'unsafe-inline' 'unsafe-eval'"))
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
NAV = (
    ("overview", "layout-dashboard", _("Overview")),
    ("jobs", "list-details", _("Jobs")),
    ("nodes", "server-2", _("Nodes")),
)
SECTION = {"job": "jobs", "node": "nodes"}


@sync_and_async_middleware
def security_headers(get_response: Handler | AsyncHandler) -> Handler | AsyncHandler:
    """Outermost: even a refusal carries the policy and an id that the log knows."""
    if iscoroutinefunction(get_response):

        async def ahandle(request: HttpRequest) -> HttpResponseBase:
            name_request(request)
            return with_headers(request, await get_response(request))

        return ahandle

    def handle(request: HttpRequest) -> HttpResponseBase:
        name_request(request)
        return with_headers(request, get_response(request))  # type: ignore[arg-type]

    return handle


@sync_and_async_middleware
def body_limit(get_response: Handler | AsyncHandler) -> Handler | AsyncHandler:
    """Refuses by the announced length; `limits.BodyLimit` around the ASGI application counts what really arrives."""
    if iscoroutinefunction(get_response):

        async def ahandle(request: HttpRequest) -> HttpResponseBase:
            return refusal(request) or await get_response(request)

        return ahandle

    def handle(request: HttpRequest) -> HttpResponseBase:
        return refusal(request) or get_response(request)  # type: ignore[return-value]

    return handle


def page_context(request: HttpRequest) -> dict[str, object]:
    """For the shell of every page: where one can go, and where one is."""
    match = request.resolver_match
    here = (match.url_name or "") if match else ""
    places = [
        {"url": reverse(name), "icon": icon, "label": label, "current": SECTION.get(here, here) == name}
        for name, icon, label in NAV
    ]
    return {"nav": places, "current_page": here, "request_id": request.META.get("gpuyard.request_id", "")}


def name_request(request: HttpRequest) -> None:
    given = request.headers.get("X-Request-ID", "")
    request.META["gpuyard.request_id"] = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def with_headers(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    policy = CONSOLE if request.path.startswith("/console/") else PAGES
    response.headers.setdefault("Content-Security-Policy", policy)
    response.headers.setdefault("Permissions-Policy", "camera=(), microphone=(), geolocation=()")
    response.headers["X-Request-ID"] = request.META["gpuyard.request_id"]
    return response


def refusal(request: HttpRequest) -> HttpResponse | None:
    try:
        length = int(request.headers.get("Content-Length") or 0)
    except ValueError:
        length = 0
    if length <= settings.MAX_BODY_BYTES:
        return None
    return HttpResponse(too_large_body(settings.MAX_BODY_BYTES), status=413, content_type="application/problem+json")
