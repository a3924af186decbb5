"""A cast of three and machines to share."""

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from portal.models import Gpu, Node, User
from portal.services import accounts, tokens
from wire.signing import new_private_key, public_key_of

GIB = 1024**3


@dataclass(frozen=True)
class Cast:
    """alice is admin; bob and charlie are members, strangers to each other."""

    alice: User
    bob: User
    charlie: User


@pytest.fixture
def cast(db: None) -> Cast:
    return Cast(*(accounts.create_user(name, "correct-horse-battery") for name in ("alice", "bob", "charlie")))


def make_node(name: str = "n1", gpus: int = 8, model: str = "H100", memory_gib: int = 80, **fields: Any) -> Node:
    """A ready node that just sent a heartbeat, its GPUs all joined by NVLink."""
    node = Node.objects.create(
        name=name,
        state="ready",
        public_key=public_key_of(new_private_key()),
        broker_password_sha256="0" * 64,
        last_heartbeat_at=timezone.now(),
        boot_id="boot-1",
        inventory_digest="d",
        **fields,
    )
    uuids = [gpu_uuid(name, index) for index in range(gpus)]
    Gpu.objects.bulk_create(
        Gpu(
            node=node,
            uuid=uuid,
            index=index,
            vendor="nvidia",
            name=f"NVIDIA {model}",
            model=model,
            memory_total_bytes=memory_gib * GIB,
            power_limit_mw=700_000,
        )
        for index, uuid in enumerate(uuids)
    )
    node.links = [[a, b, "NV18"] for i, a in enumerate(uuids) for b in uuids[i + 1 :]]
    node.save(update_fields=["links"])
    return node


def gpu_uuid(node: str, index: int) -> str:
    digest = hashlib.sha256(f"{node}/{index}".encode()).hexdigest()
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


class Api:
    """The REST interface as one person's program sees it."""

    def __init__(self, token: str | None) -> None:
        self._client = Client()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, **headers: str) -> Any:
        return self._client.get(f"/api/v1{path}", headers=self._headers | headers)

    def post(self, path: str, body: Any = None, content_type: str = "application/json", **headers: str) -> Any:
        return self._client.post(f"/api/v1{path}", body, content_type=content_type, headers=self._headers | headers)


@pytest.fixture
def api(cast: Cast) -> dict[str, Api]:
    """By name: alice, bob, charlie, and `nobody` without a token."""
    people = {name: Api(tokens.issue(getattr(cast, name), "test")) for name in ("alice", "bob", "charlie")}
    return people | {"nobody": Api(None)}
