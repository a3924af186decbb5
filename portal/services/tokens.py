"""Bearer tokens. The token is shown once; only its digest is stored."""

import hashlib
import secrets
from datetime import timedelta

from django.db.models import Q
from django.utils import timezone

from portal.models import ApiToken, User
from portal.services.errors import field_problem
from portal.services.text import storable

PREFIX = "gy_"
SHOWN_CHARACTERS = 8
MAX_DAYS = 90
USE_IS_NOTED_EVERY = timedelta(minutes=1)


def issue(user: User, name: str, days: int = MAX_DAYS) -> str:
    """-> the token. Nobody can read it again later."""
    if not 1 <= days <= MAX_DAYS:
        raise field_problem(400, "invalid", "days", f"a token lives between 1 and {MAX_DAYS} days.")
    token = PREFIX + secrets.token_urlsafe(32)
    ApiToken.objects.create(
        user=user,
        name=storable(name.strip() or "token", 60),
        prefix=token[:SHOWN_CHARACTERS],
        digest=digest_of(token),
        expires_at=timezone.now() + timedelta(days=days),
    )
    return token


def user_for(token: str) -> User | None:
    """-> who acts with this token, or None if it is unknown, revoked or over, or its owner was deactivated."""
    if not token.startswith(PREFIX) or len(token) > 200:
        return None
    now = timezone.now()
    found = (
        ApiToken.objects.select_related("user")
        .filter(digest=digest_of(token), revoked_at=None, user__is_active=True)
        .filter(Q(expires_at=None) | Q(expires_at__gt=now))
        .first()
    )
    if found is None:
        return None
    if found.last_used_at is None or now - found.last_used_at > USE_IS_NOTED_EVERY:
        ApiToken.objects.filter(pk=found.pk).update(last_used_at=now)
    return found.user


def revoke(token: ApiToken) -> None:
    ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now())


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
