"""What a supervisor asks: alive, and ready."""

import json
import socket
import time
from typing import Any

import pytest
from django.test import Client

from portal.services import ingest
from portal.services.broker import client


def ready(answer: Any) -> dict[str, Any]:
    return dict(json.loads(answer.content))


def alive_since(seconds: float, lag_s: float = 0.0) -> None:
    client().set(ingest.ALIVE_KEY, json.dumps({"at": time.time() - seconds, "lag_s": lag_s}))


def test_alive_needs_no_database() -> None:
    assert json.loads(Client().get("/healthz").content) == {"status": "alive"}


@pytest.mark.django_db
def test_ready_when_all_answer(broker_url: str) -> None:
    alive_since(0)
    answer = Client().get("/readyz")
    assert (answer.status_code, ready(answer)["ready"]) == (200, True)
    assert ready(answer)["ingest"]["lag_s"] < 5


@pytest.mark.django_db
def test_not_ready_while_ingest_was_never_seen(broker_url: str) -> None:
    answer = Client().get("/readyz")
    assert answer.status_code == 503
    assert "manage.py ingest" in ready(answer)["ingest"]["problem"]


@pytest.mark.django_db
def test_not_ready_while_ingest_is_far_behind(broker_url: str) -> None:
    alive_since(0, lag_s=120)
    answer = Client().get("/readyz")
    assert answer.status_code == 503
    assert "120 s behind" in ready(answer)["ingest"]["problem"]


@pytest.mark.django_db
def test_a_broker_that_is_away_is_named_soon_and_without_its_address(settings: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refuses
        settings.REDIS_URL = f"redis://:hunter2@127.0.0.1:{taken.getsockname()[1]}/0"
        begun = time.monotonic()
        answer = Client().get("/readyz")
    assert answer.status_code == 503
    assert ready(answer)["broker"]["ok"] is False and ready(answer)["database"]["ok"] is True
    assert b"hunter2" not in answer.content and b"127.0.0.1" not in answer.content
    assert time.monotonic() - begun < 8
