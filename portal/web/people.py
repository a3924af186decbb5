"""Who is looking at a page."""

from typing import cast

from django.http import HttpRequest

from portal.models import User


def person(request: HttpRequest) -> User:
    """The signed-in user; only for views behind `login_required`."""
    return cast(User, request.user)
