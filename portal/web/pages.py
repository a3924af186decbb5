"""What every page view shares: someone is signed in, and a refusal becomes a page with its sentence."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponseBase

from portal.services.errors import Problem
from portal.web.problems import refused

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponseBase]


def page(view: View[P]) -> View[P]:
    @wraps(view)
    def shown(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        try:
            return view(request, *args, **kwargs)
        except Problem as problem:
            return refused(request, problem)

    return login_required(shown)
