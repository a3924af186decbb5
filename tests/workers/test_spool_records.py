"""Records and plans on disk: what is read is what was written, or nothing."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import plan
from workers.plan import Limits, Plan

TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=40)
NAMES = st.text(st.characters(blacklist_characters="\0=", blacklist_categories=["Cs"]), min_size=1, max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["argv", "env", "x"]), TEXT), min_size=1), st.binary(max_size=50))
def test_a_record_comes_back_whatever_lies_behind_its_end(pairs: plan.Pairs, rest: bytes) -> None:
    assert plan.decode(plan.encode(pairs) + rest) == pairs


@given(st.lists(st.tuples(st.just("key"), TEXT), min_size=1), st.data())
def test_a_torn_record_is_no_record(pairs: plan.Pairs, data: st.DataObject) -> None:
    whole = plan.encode(pairs)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert plan.decode(whole[:cut]) is None
    assert plan.decode(whole[:cut] + bytes(100)) is None


@given(st.lists(TEXT, min_size=1), st.dictionaries(NAMES, TEXT), st.one_of(st.none(), st.floats(0.001, 1e9)))
@settings(max_examples=50)
def test_a_plan_comes_back_word_for_word(argv: list[str], env: dict[str, str], limit: float | None) -> None:
    limits = Limits(1.5, limit, 7, "none", 3.5)
    made = Plan(argv, env, "/some where", ["launcher", "rank-0"], stops_tree=False, limits=limits)
    made.share, made.accepted_s = "an-id", 12.25
    read = plan.decode_plan(made.encode())
    assert {**vars(read), "limits": vars(read.limits)} == {**vars(made), "limits": vars(made.limits)}


def test_a_nul_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        plan.encode([("argv", "a\0b")])


def test_bytes_that_are_no_text_survive() -> None:
    word = os.fsdecode(b"\xff\xfe")
    assert plan.decode(plan.encode([("argv", word)])) == [("argv", word)]


def test_a_reserved_file_is_empty_until_it_is_written_in_place(tmp_path: Path) -> None:
    file = tmp_path / "exit"
    path = str(file)
    plan.reserve(path)
    assert plan.read_record(path) is None
    before = file.stat()
    plan.write_record(path, [("reason", "exited"), ("message", "two\nlines")])
    assert plan.read_record(path) == {"reason": "exited", "message": "two\nlines"}
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)
    assert after.st_blocks * 512 >= plan.RESERVED_BYTES


def test_a_nudge_never_waits(tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    assert not plan.nudge(fifo), "nobody reads"
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    for _ in range(100_000):
        assert plan.nudge(fifo)
    os.close(reader)
    assert not plan.nudge(str(tmp_path / "gone"))


def test_identity_is_pid_and_start_time() -> None:
    started = plan.start_time(os.getpid())
    assert started is not None
    assert started == plan.start_time(os.getpid())
    assert plan.start_time(2**22 + 1) is None
    assert len(plan.boot_id()) == 36
