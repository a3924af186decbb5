"""Signing in and up, and tokens that are shown once."""

import re

import pytest
from django.test import Client

from portal.models import Project, User
from portal.services import accounts, tokens
from tests.portal.conftest import Cast

pytestmark = pytest.mark.django_db
PASSWORD = "correct-horse-battery"


@pytest.fixture
def visitor(broker_url: str) -> Client:
    return Client()


def sign_up(client: Client, name: str) -> int:
    form = {"username": name, "password1": PASSWORD, "password2": PASSWORD}
    return client.post("/signup/", form).status_code


def test_the_first_account_may_be_made_and_becomes_admin(visitor: Client, db: None) -> None:
    assert "Make the first one" in visitor.get("/login/").content.decode()
    assert "becomes the administrator" in visitor.get("/signup/").content.decode()
    assert sign_up(visitor, "alice") == 302
    alice = User.objects.get()
    assert alice.is_superuser and Project.objects.get(personal_owner=alice).name == "alice"
    assert visitor.get("/").status_code == 200


def test_then_the_door_is_shut(visitor: Client, cast: Cast) -> None:
    assert "Sign-up is closed" in visitor.get("/signup/").content.decode()
    sign_up(visitor, "mallory")
    assert not User.objects.filter(username="mallory").exists()
    assert "Make one" not in visitor.get("/login/").content.decode()


def test_unless_the_settings_hold_it_open(visitor: Client, cast: Cast, settings: object) -> None:
    settings.SIGNUP_OPEN = True  # type: ignore[attr-defined]
    assert sign_up(visitor, "dora") == 302
    dora = User.objects.get(username="dora")
    assert not dora.is_superuser and not dora.is_staff
    assert Project.objects.filter(personal_owner=dora).exists()


def test_a_wrong_password_says_so_and_lets_nobody_in(visitor: Client, cast: Cast) -> None:
    answer = visitor.post("/login/", {"login": "bob", "password": "wrong-wrong-wrong"})
    assert answer.status_code == 200 and 'role="alert"' in answer.content.decode()
    assert visitor.get("/").status_code == 302


def test_signing_in_leads_to_where_one_wanted_to_go_but_never_outside(visitor: Client, cast: Cast) -> None:
    form = {"login": "bob", "password": PASSWORD}
    assert visitor.post("/login/?next=/nodes/", form | {"next": "/nodes/"}).headers["Location"] == "/nodes/"
    away = Client().post("/login/?next=https://evil.example/", form | {"next": "https://evil.example/"})
    assert away.headers["Location"] == "/"


def test_signing_out_needs_a_post(visitor: Client, cast: Cast) -> None:
    visitor.force_login(cast.bob)
    visitor.get("/logout/")
    assert visitor.get("/").status_code == 200
    visitor.post("/logout/")
    assert visitor.get("/").status_code == 302


def test_a_token_is_shown_once_works_and_can_be_revoked(visitor: Client, cast: Cast) -> None:
    visitor.force_login(cast.bob)
    page = visitor.post("/tokens/make/", {"name": "laptop", "days": "30"})
    shown = re.search(r'id="made-token">(gy_[^<]+)<', page.content.decode())
    assert shown and "no-store" in page.headers["Cache-Control"]
    assert tokens.user_for(shown[1]) == cast.bob
    listed = visitor.get("/tokens/").content.decode()
    assert shown[1] not in listed and "laptop" in listed
    token = cast.bob.tokens.get()
    assert token.expires_at and (token.expires_at - token.created_at).days in {29, 30}
    visitor.post(f"/tokens/{token.pk}/revoke/")
    assert tokens.user_for(shown[1]) is None


def test_nobody_revokes_anothers_token(visitor: Client, cast: Cast) -> None:
    secret = tokens.issue(cast.charlie, "his")
    visitor.force_login(cast.bob)
    assert visitor.post(f"/tokens/{cast.charlie.tokens.get().pk}/revoke/").status_code == 404
    assert tokens.user_for(secret) == cast.charlie


def test_a_name_is_shown_as_it_was_written(visitor: Client, cast: Cast) -> None:
    visitor.force_login(cast.bob)
    visitor.post("/tokens/make/", {"name": "<img src=x onerror=alert(1)>", "days": "7"})
    html = visitor.get("/tokens/").content.decode()
    assert "<img src=x" not in html and "&lt;img src=x" in html


def test_who_is_admin_sees_the_console_in_the_menu(visitor: Client, cast: Cast) -> None:
    visitor.force_login(cast.alice)
    assert "Admin console" in visitor.get("/tokens/").content.decode()
    visitor.force_login(cast.bob)
    assert "Admin console" not in visitor.get("/tokens/").content.decode()


def test_two_first_accounts_make_one_admin(db: None) -> None:
    made = [accounts.create_user(name, PASSWORD) for name in ("one", "two")]
    assert [user.is_superuser for user in made] == [True, False]
