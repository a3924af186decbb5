"""The console: an admin cordons a node, makes a user, revokes a token; states are not editable by hand."""

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import reverse

from portal.models import ApiToken, Event, Job, Node, Project, User
from portal.services import tokens
from tests.portal.conftest import Cast, make_node


@pytest.fixture
def console(cast: Cast, assets: None) -> Client:
    client = Client()
    client.force_login(cast.alice)
    return client


@pytest.mark.parametrize("model", sorted(admin.site._registry, key=lambda model: model.__name__))
def test_every_list_opens(console: Client, model: type) -> None:
    make_node()
    names = model._meta  # type: ignore[attr-defined]
    assert console.get(reverse(f"admin:{names.app_label}_{names.model_name}_changelist")).status_code == 200


def test_a_member_may_not_enter(cast: Cast) -> None:
    client = Client()
    client.force_login(cast.bob)
    assert client.get("/console/").status_code == 302


def test_cordoning_a_node_is_recorded_with_who_did_it(console: Client, cast: Cast) -> None:
    node = make_node()
    console.post(f"/console/portal/node/{node.pk}/change/", {"cordon_reason": "new fans"})
    node = Node.objects.get(pk=node.pk)
    assert (node.schedulable, node.cordon_reason, node.state) == (False, "new fans", "ready")
    event = Event.objects.get(kind="node.cordoned")
    assert (event.actor, event.message, event.node) == (cast.alice, "new fans", node)
    console.post(f"/console/portal/node/{node.pk}/change/", {"schedulable": "on", "cordon_reason": ""})
    assert Node.objects.get(pk=node.pk).schedulable and Event.objects.filter(kind="node.uncordoned").count() == 1


def test_a_new_user_gets_a_project(console: Client) -> None:
    form = {
        "username": "dora",
        "password1": "correct-horse-battery",
        "password2": "correct-horse-battery",
        "usable_password": "true",
        "memberships-TOTAL_FORMS": "0",
        "memberships-INITIAL_FORMS": "0",
    }
    assert console.post("/console/portal/user/add/", form).status_code == 302
    assert Project.objects.get(personal_owner__username="dora").name == "dora"
    assert not User.objects.get(username="dora").is_superuser


def test_a_token_is_revoked(console: Client, cast: Cast) -> None:
    token = tokens.issue(cast.bob, "laptop")
    chosen = ApiToken.objects.get(user=cast.bob)
    console.post("/console/portal/apitoken/", {"action": "revoke", "_selected_action": [chosen.pk]})
    assert tokens.user_for(token) is None


def test_a_jobs_state_cannot_be_edited(console: Client, cast: Cast) -> None:
    job = Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="j", spec={}, gpu_count=1)
    console.post(f"/console/portal/job/{job.pk}/change/", {"state": "succeeded"})
    console.post(f"/console/portal/job/{job.pk}/delete/", {"post": "yes"})
    assert Job.objects.get(pk=job.pk).state == "waiting"
