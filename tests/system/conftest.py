"""One running portal for all system tests; after each test nothing of a job may be alive."""

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from allinone.options import Options
from allinone.stack import Stack
from allinone.terminal import Terminal
from allinone.valkey import some_free_port
from tests.system.yard import FAULTS, KERNEL_LOG, Yard


@pytest.fixture(scope="session")
def _yard() -> Iterator[Yard]:
    # Not in pytest's own folder: that is closed to the account that PostgreSQL runs as when we are root.
    state_dir = Path(tempfile.mkdtemp(prefix="gpuyard-yard-"))
    state_dir.chmod(0o711)
    (state_dir / KERNEL_LOG).touch()
    options = dataclasses.replace(Options.load({}), state_dir=state_dir, port=some_free_port())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPUYARD_SIM_FAULTS", str(state_dir / FAULTS))
            patch.setenv("GPUYARD_KMSG", str(state_dir / KERNEL_LOG))
            with Stack(options, Terminal()) as stack:
                yield Yard(stack)
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)


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
