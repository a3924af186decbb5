"""Signing in and up, and the tokens by which programs act for a person."""

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.views import LoginView, SignupView
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from portal.models import ApiToken, User
from portal.services import accounts, tokens
from portal.web.people import person

TOKEN_DAYS = (7, 30, 90)


class AccountAdapter(DefaultAccountAdapter):
    """Sign-up is open for the very first account, and afterwards only if the settings say so."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:  # noqa: ARG002
        return sign_up_open()

    @transaction.atomic
    def save_user(self, request: HttpRequest, user: User, form: Any, commit: bool = True) -> User:
        saved: User = super().save_user(request, user, form, commit=commit)
        return accounts.welcome(saved) if commit else saved


def nobody_yet() -> bool:
    return not User.objects.exists()


def sign_up_open() -> bool:
    return settings.SIGNUP_OPEN or nobody_yet()


class Login(LoginView):
    extra_context = {"open_for_signup": sign_up_open, "first_account": nobody_yet}


class Signup(SignupView):
    extra_context = {"first_account": nobody_yet}


@login_required
@never_cache
@require_safe
def token_list(request: HttpRequest) -> HttpResponse:
    return token_page(request)


@login_required
@never_cache
@require_POST
def token_make(request: HttpRequest) -> HttpResponse:
    """Answers with the page itself: the token is shown this once and stored nowhere."""
    asked = request.POST.get("days", "")
    days = int(asked) if asked in {str(choice) for choice in TOKEN_DAYS} else TOKEN_DAYS[-1]
    made = tokens.issue(person(request), request.POST.get("name", ""), days=days)
    return token_page(request, made)


@login_required
@require_POST
def token_revoke(request: HttpRequest, token_id: int) -> HttpResponseRedirect:
    tokens.revoke(get_object_or_404(ApiToken, pk=token_id, user=person(request)))
    messages.success(request, _("The token is revoked. Programs that use it are refused from now on."))
    return redirect("tokens")


def token_page(request: HttpRequest, made: str = "") -> HttpResponse:
    mine = ApiToken.objects.filter(user=person(request), revoked_at__isnull=True)
    return render(request, "account/tokens.html", {"tokens": mine, "made": made, "day_choices": TOKEN_DAYS})
