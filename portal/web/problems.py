"""Refusals and failures as pages: one sentence and the way out. They need neither a user nor a database."""

import sys
from http import HTTPStatus

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from psycopg_pool import PoolTimeout
from redis import RedisError

from portal.services.errors import Problem

DATABASE_AWAY = (OperationalError, InterfaceError, PoolTimeout)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:  # noqa: ARG001
    return problem_page(request, 400, _("This request cannot be read"), _("Go back and load the page again."))


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:  # noqa: ARG001
    return problem_page(
        request, 403, _("Not allowed"), _("Your account may not do this. A project's manager or the administrator can.")
    )


def csrf_failed(request: HttpRequest, reason: str = "") -> HttpResponse:  # noqa: ARG001
    return problem_page(
        request, 403, _("The page was too old"), _("Nothing was changed. Load the page again and repeat it.")
    )


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:  # noqa: ARG001
    return problem_page(request, 404, _("There is nothing here"), _("It does not exist, or it is not yours to see."))


def server_error(request: HttpRequest) -> HttpResponse:
    error = sys.exc_info()[1]
    if isinstance(error, Problem):
        return refused(request, error)
    if isinstance(error, DATABASE_AWAY):
        return unavailable(request, _("its database"))
    if isinstance(error, RedisError):
        return unavailable(request, _("its message broker"))
    detail = _("The portal failed here. Running jobs are not touched. The request number finds the cause in its log.")
    return problem_page(request, 500, _("The portal failed"), detail)


def refused(request: HttpRequest, problem: Problem) -> HttpResponse:
    response = problem_page(request, problem.status, HTTPStatus(problem.status).phrase, problem.detail)
    for name, value in problem.headers.items():
        response[name] = value
    return response


def unavailable(request: HttpRequest, what: str) -> HttpResponse:
    detail = _("The portal cannot reach %(what)s. Nothing was changed; running jobs go on. Try again in a few seconds.")
    response = problem_page(request, 503, _("Not available right now"), detail % {"what": what})
    response["Retry-After"] = "5"
    return response


def problem_page(request: HttpRequest, status: int, title: str, detail: str) -> HttpResponse:
    context = {
        "status": status,
        "title": title,
        "detail": detail,
        "request_id": request.META.get("gpuyard.request_id", ""),
    }
    return HttpResponse(render_to_string("problem.html", context), status=status)
