"""Who is asking: a bearer token, or the browser's session (then with a CSRF token for every write)."""

from typing import cast

from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import CsrfViewMiddleware
from ninja.errors import AuthenticationError
from ninja.security.base import AuthBase

from portal.models import User
from portal.services import tokens
from portal.services.errors import Problem

READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Credentials(AuthBase):
    """A bearer header makes the cookie count for nothing, so that a page cannot lend its session to a program."""

    openapi_type = "http"
    openapi_scheme = "bearer"

    def __call__(self, request: HttpRequest) -> User | None:
        header = request.headers.get("Authorization")
        return self._by_token(header) if header is not None else self._by_session(request)

    def _by_token(self, header: str) -> User:
        scheme, _, token = header.partition(" ")
        user = tokens.user_for(token.strip()) if scheme.lower() == "bearer" else None
        if user is None:
            raise AuthenticationError
        return user

    def _by_session(self, request: HttpRequest) -> User | None:
        if not request.user.is_authenticated:
            return None
        if request.method not in READS and not has_csrf_token(request):
            raise Problem(403, "csrf_failed", "The page's CSRF token is missing or old. Load the page again.")
        return request.user


def has_csrf_token(request: HttpRequest) -> bool:
    check = CsrfCheck(unexempted)
    check.process_request(request)
    return check.process_view(request, unexempted, (), {}) is None


def unexempted(_: HttpRequest) -> HttpResponse:
    """A view that Django would check: the API's own are exempt from its middleware."""
    return HttpResponse()


class CsrfCheck(CsrfViewMiddleware):
    """Says only that a token is missing; what to answer is for the API to say."""

    def _reject(self, request: HttpRequest, reason: str) -> HttpResponse:  # noqa: ARG002
        return HttpResponse(reason, status=403)


def user_of(request: HttpRequest) -> User:
    """The user whom `Credentials` let in."""
    return cast(User, request.auth)  # type: ignore[attr-defined]
