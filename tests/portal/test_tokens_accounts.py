"""Tokens, accounts, and the commands that make them."""

import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from portal.models import ApiToken, Membership, Project, User
from portal.services import access, accounts, tokens
from portal.services.errors import Problem
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import submitted
from wire.signing import new_private_key, public_key_of


def said(*command: str) -> str:
    out = io.StringIO()
    call_command(*command, stdout=out)
    return out.getvalue().strip()


def test_a_token_acts_for_its_owner_and_only_its_digest_is_kept(cast: Cast) -> None:
    token = tokens.issue(cast.bob, "laptop")
    assert tokens.user_for(token) == cast.bob
    row = ApiToken.objects.get()
    assert token.startswith("gy_") and len(token) >= 46
    assert token not in json.dumps([row.prefix, row.digest, row.name]) and len(row.prefix) == 8


@pytest.mark.parametrize("change", [
    {"revoked_at": timezone.now()}, {"expires_at": timezone.now() - timedelta(seconds=1)}, {"digest": "0" * 64},
])  # fmt: skip
def test_a_token_that_no_longer_counts_acts_for_nobody(cast: Cast, change: dict[str, Any]) -> None:
    token = tokens.issue(cast.bob, "laptop")
    ApiToken.objects.update(**change)
    assert tokens.user_for(token) is None


@pytest.mark.parametrize("token", ["", "gy_", "gy_nothing", "x" * 5000, "gy_\x00", "gy_\ud800", "Bearer gy_x"])
def test_garbage_acts_for_nobody(cast: Cast, token: str) -> None:
    assert tokens.user_for(token) is None


def test_the_token_of_a_deactivated_person_acts_for_nobody(cast: Cast) -> None:
    token = tokens.issue(cast.bob, "laptop")
    User.objects.filter(pk=cast.bob.pk).update(is_active=False)
    assert tokens.user_for(token) is None


def test_use_is_noted_at_most_once_a_minute(cast: Cast) -> None:
    token = tokens.issue(cast.bob, "laptop")
    tokens.user_for(token)
    first = ApiToken.objects.get().last_used_at
    tokens.user_for(token)
    assert first is not None and ApiToken.objects.get().last_used_at == first
    ApiToken.objects.update(last_used_at=first - timedelta(minutes=2))
    tokens.user_for(token)
    assert ApiToken.objects.get().last_used_at > first  # type: ignore[operator]


@pytest.mark.parametrize("days", [0, -1, 91])
def test_a_token_lives_at_most_ninety_days(cast: Cast, days: int) -> None:
    with pytest.raises(Problem, match="days"):
        tokens.issue(cast.bob, "x", days)


def test_the_first_account_is_admin_and_everyone_has_a_project(cast: Cast) -> None:
    assert [person.is_superuser for person in (cast.alice, cast.bob, cast.charlie)] == [True, False, False]
    assert cast.bob.personal_project.memberships.get().role == Membership.Role.MANAGER
    accounts.welcome(cast.bob)
    assert Project.objects.filter(personal_owner=cast.bob).count() == 1


def test_a_project_name_that_a_team_took_gets_a_number(cast: Cast) -> None:
    Project.objects.create(name="dora")
    assert accounts.create_user("Dora", "correct-horse-battery").personal_project.name == "dora-2"
    assert accounts.create_user("用户", "correct-horse-battery").personal_project.name == "user"


def test_who_may_not_see_a_thing_is_told_the_same_as_if_it_were_not_there(cast: Cast) -> None:
    make_node()
    job = submitted(cast.bob)
    assert access.get_job(cast.bob, job.pk) == access.get_job(cast.alice, job.pk) == job
    for person, job_id in ((cast.charlie, job.pk), (cast.bob, 10**6), (cast.bob, 2**70), (cast.bob, -1)):
        with pytest.raises(Problem) as caught:
            access.get_job(person, job_id)
        assert (caught.value.status, caught.value.detail) == (
            404,
            f"There is no job {job_id}, or it is not yours to see.",
        )
    for get, name in ((access.get_node, "nope"), (access.get_node, "\x00"), (access.get_project, "bob")):
        with pytest.raises(Problem):
            get(cast.charlie, name)


def test_the_token_command_prints_a_token(cast: Cast) -> None:
    assert tokens.user_for(said("token", "bob")) == cast.bob
    for wrong in (("token", "nobody"), ("token", "bob", "--days", "1000")):
        with pytest.raises(CommandError):
            said(*wrong)


def test_the_demo_people_can_be_made_again_with_the_same_logins(db: None, tmp_path: Path, settings: Any) -> None:
    settings.STATE_DIR = tmp_path / "state"
    first = json.loads(said("demo_users"))
    assert [login["username"] for login in first] == ["alice", "bob", "charlie"] and json.loads(
        said("demo_users")
    ) == first
    assert all(User.objects.get(username=login["username"]).check_password(login["password"]) for login in first)
    assert [user.is_superuser for user in User.objects.order_by("username")] == [True, False, False]
    assert Project.objects.get(name="vision").memberships.count() == 3
    bob = User.objects.get(username="bob")
    bob.set_password("my-own-password")
    bob.save()
    assert json.loads(said("demo_users"))[1]["password"] is None, "a password of one's own is kept"
    given = tmp_path / "password"
    given.write_text("for-everybody\n")
    assert {login["password"] for login in json.loads(said("demo_users", "--password-file", str(given)))} == {
        "for-everybody"
    }
    assert User.objects.get(username="bob").check_password("for-everybody")


def test_the_enroll_command_prints_what_a_node_must_know(db: None, broker_url: str) -> None:
    key = public_key_of(new_private_key()).hex()
    known = json.loads(said("enroll", "n1", key))
    assert set(known) == {"node", "portal_public_key", "broker_url", "protocol"} and known["node"] == "n1"
    assert "node.n1:" in known["broker_url"]
    with pytest.raises(CommandError, match="another key"):
        said("enroll", "n1", key[::-1])
