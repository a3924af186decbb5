"""One running portal for all system tests; after each test nothing of a job may be alive."""

from collections.abc import Iterator

import pytest

from tests.system.yard import Yard, running


@pytest.fixture(scope="session")
def _yard() -> Iterator[Yard]:
    with running() as yard:
        yield yard


@pytest.fixture
def yard(_yard: Yard) -> Iterator[Yard]:
    before = {job["id"] for job in _yard.bob.jobs(limit=50)} | {job["id"] for job in _yard.charlie.jobs(limit=50)}
    yield _yard
    mine = {job["id"] for client in (_yard.bob, _yard.charlie) for job in client.jobs(limit=50)} - before
    for number in mine:
        client = _yard.bob if _yard._bobs(number) else _yard.charlie
        client.cancel(number)
    for number in mine:
        _yard.ended(number, timeout_s=90)
        _yard.wait(f"nothing of job {number} is alive", lambda number=number: not _yard.processes(number), 10)
    _yard.wait("every GPU is free again", lambda: _yard.free_gpus() == 8, 20)
