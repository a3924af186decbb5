"""People: the first one is admin, everyone has a project of their own name."""

import re

from django.db import transaction

from portal.models import Membership, Project, User
from portal.services import events

DEMO_USERS = ("alice", "bob", "charlie")
DEMO_PROJECT = "vision"

FIRST_USER_LOCK = 7_305_001
"""Advisory lock: two first sign-ups at once must not both become admin."""


@transaction.atomic
def create_user(username: str, password: str, email: str = "") -> User:
    user = User(username=username, email=email)
    user.set_password(password)
    user.save()
    return welcome(user)


@transaction.atomic
def welcome(user: User) -> User:
    """What every new account gets, however it was made. Harmless when repeated."""
    lock_first_user()
    if not User.objects.filter(is_superuser=True).exists():
        user.is_superuser = user.is_staff = True
        user.save(update_fields=["is_superuser", "is_staff"])
        events.record("user.admin", actor=user, message=f"{user.username} is the first account, hence admin.")
    if not Project.objects.filter(personal_owner=user).exists():
        project = Project.objects.create(name=free_project_name(user.username), personal_owner=user)
        join(project, user, Membership.Role.MANAGER)
    return user


@transaction.atomic
def demo(password: str, *, reset: bool = False) -> list[dict[str, str | None]]:
    """-> the logins. Who is there already keeps their own password, unless they are all to be reset."""
    team, _ = Project.objects.get_or_create(name=DEMO_PROJECT)
    logins = [demo_login(name, password, reset) for name in DEMO_USERS]
    for number, user in enumerate(User.objects.filter(username__in=DEMO_USERS).order_by("pk")):
        join(team, user, Membership.Role.MEMBER if number else Membership.Role.MANAGER)
    return logins


def demo_login(name: str, password: str, reset: bool) -> dict[str, str | None]:
    user = User.objects.filter(username=name).first() or create_user(name, password)
    same = user.check_password(password)
    if reset and not same:
        user.set_password(password)
        user.save(update_fields=["password"])
    return {"username": name, "password": password if same or reset else None}


def join(project: Project, user: User, role: str = Membership.Role.MEMBER) -> None:
    Membership.objects.get_or_create(project=project, user=user, defaults={"role": role})


def free_project_name(username: str) -> str:
    """A slug of the user's name that no team has taken."""
    slug = re.sub(r"[^a-z0-9_-]+", "-", username.lower()).strip("-")[:32] or "user"
    taken = set(Project.objects.filter(name__startswith=slug).values_list("name", flat=True))
    number = 2
    name = slug
    while name in taken:
        name, number = f"{slug}-{number}", number + 1
    return name


def lock_first_user() -> None:
    connection = transaction.get_connection()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [FIRST_USER_LOCK])
