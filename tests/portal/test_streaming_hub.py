"""The one listener of a process: it goes when its last watcher goes, at whatever moment that is."""

import asyncio

import pytest

from portal.services.hub import Hub
from tests.portal.watching import run


def test_a_listener_ends_whenever_its_last_watcher_leaves(broker_url: str) -> None:
    """Also in the midst of connecting, where the client library may keep a cancellation for itself."""

    async def leave_after(steps: int) -> bool:
        hub = Hub(broker_url)
        async with hub.mailbox("live.cluster"):
            listener = hub._listener
            for _ in range(steps):
                await asyncio.sleep(0)
        assert listener is not None
        done, _ = await asyncio.wait({listener}, timeout=8)
        return bool(done)

    async def scenario() -> list[int]:
        ended = await asyncio.gather(*(leave_after(steps) for steps in range(60)))
        return [steps for steps, did in enumerate(ended) if not did]

    assert run(scenario()) == []


def test_a_listener_that_finds_no_broker_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> bool:
        hub = Hub("redis://127.0.0.1:1/0")
        async with hub.mailbox("live.cluster"):
            listener = hub._listener
            await asyncio.sleep(0.05)
        assert listener is not None
        done, _ = await asyncio.wait({listener}, timeout=8)
        return bool(done)

    assert run(scenario())
