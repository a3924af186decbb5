"""Every refusal of the API in one shape: RFC 9457 problem+json, with a code, a sentence and the fields."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError
from psycopg_pool import PoolTimeout

from portal.services.errors import Problem

log = logging.getLogger(__name__)


def install(api: NinjaAPI) -> None:
    """Make every exception that a route can raise answer as a problem."""
    for kind, answer in ANSWERS.items():
        api.add_exception_handler(kind, answer)


def respond(request: HttpRequest, problem: Problem) -> HttpResponse:
    body: dict[str, Any] = {
        "type": problem.code,
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        "errors": problem.errors,
        "request_id": request.META.get("gpuyard.request_id", ""),
    }
    response = JsonResponse(body, status=problem.status, content_type="application/problem+json")
    for name, value in problem.headers.items():
        response[name] = value
    response["Cache-Control"] = "no-store"
    return response


def unknown_address(request: HttpRequest) -> HttpResponse:
    """For every address below /api/ that no route has: a program gets a problem, not a page."""
    return respond(
        request, Problem(404, "not_found", "There is nothing at this address. The API is described at /api/v1/docs.")
    )


def _invalid_parameters(request: HttpRequest, error: ValidationError) -> HttpResponse:
    errors = [
        {"field": ".".join(str(part) for part in item["loc"][1:]), "message": str(item["msg"])} for item in error.errors
    ]
    named = "; ".join(f"{item['field']}: {item['message']}" for item in errors)
    return respond(request, Problem(400, "invalid_parameter", f"{named}.", errors=errors))


def _not_authenticated(request: HttpRequest, error: AuthenticationError) -> HttpResponse:
    if request.headers.get("Authorization"):
        problem = Problem(
            401, "invalid_token", "This token is unknown, expired or revoked. `gpuyard login` takes a new one."
        )
    else:
        problem = Problem(401, "not_authenticated", "Send a token: Authorization: Bearer gy_…; make one under Tokens.")
    problem.headers["WWW-Authenticate"] = 'Bearer realm="gpuyard"'
    return respond(request, problem)


def _http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    code = {400: "invalid_json", 403: "csrf_failed", 404: "not_found", 405: "method_not_allowed"}
    return respond(request, Problem(error.status_code, code.get(error.status_code, "refused"), error.message))


def _not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    return respond(request, Problem(404, "not_found", "There is nothing here, or nothing you may see."))


def _too_large(request: HttpRequest, error: RequestDataTooBig) -> HttpResponse:
    return respond(
        request, Problem(413, "body_too_large", "The body is larger than the 1 MiB that a request may have.")
    )


def _suspicious(request: HttpRequest, error: SuspiciousOperation) -> HttpResponse:
    return respond(request, Problem(400, "bad_request", str(error) or "The request is malformed."))


def _database_unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    log.warning("database unavailable: %s", error)
    detail = (
        "The portal cannot reach its database. Nothing was changed; running jobs go on. Try again in a few seconds."
    )
    return respond(request, Problem(503, "database_unavailable", detail, headers={"Retry-After": "5"}))


def _unexpected(request: HttpRequest, error: Exception) -> HttpResponse:
    log.exception("unexpected error in %s %s", request.method, request.path)
    return respond(request, Problem(500, "internal_error", "The portal failed here; the request id is in its log."))


ANSWERS: dict[type[Exception], Callable[[HttpRequest, Any], HttpResponse]] = {
    Problem: respond,
    ValidationError: _invalid_parameters,
    AuthenticationError: _not_authenticated,
    HttpError: _http_error,
    Http404: _not_found,
    RequestDataTooBig: _too_large,
    SuspiciousOperation: _suspicious,
    OperationalError: _database_unavailable,
    InterfaceError: _database_unavailable,
    PoolTimeout: _database_unavailable,
    Exception: _unexpected,
}
