"""A flood of output stays inside its cap: head and tail are kept, what went is written down, the job never waits."""

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from yard import Yard, output

from wire.states import EndReason
from workers.trim import BLOCK_BYTES, Trimmer

MIB = 1024 * 1024


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.clear()


def numbered(first: int, count: int) -> bytes:
    return b"".join(b"%015d\n" % number for number in range(first, first + count))


def check(data: bytes, drops: list[tuple[int, int]]) -> int:
    """Every byte is what was written, or lies in a written-down range. -> how many were dropped."""
    expected = numbered(0, len(data) // 16)
    kept_from = 0
    for start, end in [*drops, (len(data), len(data))]:
        assert data[kept_from:start] == expected[kept_from:start]
        kept_from = end
    return sum(end - start for start, end in drops)


def test_the_middle_goes_and_offsets_stay(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    trimmer = Trimmer(str(path), 2 * MIB)
    written = 0
    with path.open("ab") as file:
        for _ in range(16):
            file.write(numbered(written // 16, 65536))
            file.flush()
            written += MIB
            trimmer.trim()
            assert path.stat().st_blocks * 512 <= 3 * MIB
    assert path.stat().st_size == 16 * MIB
    lines = (tmp_path / "rank-0.drops").read_text().splitlines()
    drops = [(int(start), int(end)) for start, end in (line.split() for line in lines)]
    assert all(first[1] == second[0] for first, second in pairwise(drops))
    assert all(start % BLOCK_BYTES == 0 and end % BLOCK_BYTES == 0 for start, end in drops)
    assert check(path.read_bytes(), drops) >= 14 * MIB
    assert drops[0][0] == MIB // 2
    assert drops[-1][1] <= 15.5 * MIB


def test_nothing_is_cut_within_the_cap(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(bytes(4 * MIB))
    Trimmer(str(path), 4 * MIB).trim()
    assert not (tmp_path / "rank-0.drops").exists()
    Trimmer(str(tmp_path / "not-there.log"), 1).trim()


def test_a_job_that_cuts_its_own_log_is_trimmed_anew(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(numbered(0, 524288))
    trimmer = Trimmer(str(path), 4 * MIB)
    trimmer.trim()
    assert (tmp_path / "rank-0.drops").read_text()
    os.truncate(path, 0)
    trimmer.trim()
    assert (tmp_path / "rank-0.drops").read_text() == ""
    path.write_bytes(numbered(0, 524288))
    trimmer.trim()
    assert (tmp_path / "rank-0.drops").read_text().startswith(f"{MIB} ")


def test_a_flooding_run_keeps_inside_its_cap_and_ends_by_itself(yard: Yard) -> None:
    attempt = yard.start(
        f"{sys.executable} -c \"import time\nuntil = time.monotonic() + 2.0\nnumber = 0\n"
        "while time.monotonic() < until or number < 500_000:\n"
        "  print('\\n'.join('%015d' % n for n in range(number, number + 4096)))\n  number += 4096\"",
        log_cap_bytes=2 * MIB)
    end = yard.ended(attempt, 60.0)
    assert end.reason is EndReason.EXITED
    size = attempt.log_path("rank-0").stat().st_size
    assert end.log_sizes == {"rank-0": size}
    assert size >= 16 * 500_000
    assert check(attempt.log_path("rank-0").read_bytes(), attempt.drops("rank-0")) > 0
    assert attempt.log_path("rank-0").stat().st_blocks * 512 < size


def test_a_run_that_empties_its_log_goes_on(yard: Yard) -> None:
    attempt = yard.start("/bin/sh -c 'echo before; : > /proc/self/fd/1; echo after'")
    assert yard.ended(attempt).log_sizes == {"rank-0": 6}
    assert output(attempt) == "after\n"
