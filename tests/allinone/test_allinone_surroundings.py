"""What is wrong around us becomes one sentence with the way out, before anything is started."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allinone import assets, checks
from allinone.faults import ALREADY_RUNNING, USAGE, Fault, disk_errors_named
from allinone.options import CHECKOUT, Options


def environment(state_dir: Path, **values: str) -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return {**kept, "GPUYARD_STATE_DIR": str(state_dir), **values}


def up(state_dir: Path, **values: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "allinone", "up"],
        cwd=CHECKOUT,
        env=environment(state_dir, **values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("PORT", "abc"),
        ("PORT", "0"),
        ("PORT", "70000"),
        ("DATABASE_URL", "mysql://u:secret@h/d"),
        ("DATABASE_URL", "postgresql://u:secret@h:port/d"),
        ("DATABASE_URL", "postgresql://u:secret@h"),
        ("REDIS_URL", "localhost:6379"),
        ("DEMO_EXIT", "perhaps"),
        ("GPUYARD_NODE_NAME", "Node_1"),
        ("GPUYARD_PUBLIC_URL", "gpuyard.example.org"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_its_key(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(Fault) as caught:
        Options.load({"GPUYARD_STATE_DIR": str(tmp_path), key: value})
    assert caught.value.exit_code == USAGE
    assert str(caught.value).startswith(key)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_command_says_it_without_a_traceback_and_starts_nothing(tmp_path: Path) -> None:
    answer = up(tmp_path / "var", PORT="abc")
    assert answer.returncode == USAGE
    assert answer.stderr == "PORT=abc is not a port: write a number from 1 to 65535, as in PORT=8001.\n"
    assert not (tmp_path / "var").exists()


def test_a_taken_port_is_named_with_one_that_is_free(tmp_path: Path, taken_port: int) -> None:
    answer = up(tmp_path / "var", PORT=str(taken_port))
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"Port {taken_port} is taken by another program: run `PORT=")
    assert answer.stderr.count("\n") == 1
    assert not (tmp_path / "var" / "postgres").exists()


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    options = Options(state_dir=tmp_path, host="192.0.2.1", port=8000)
    with pytest.raises(Fault, match=r"HOST=192\.0\.2\.1 is not an address of this machine"):
        checks.port_is_free(options)


def test_a_second_start_beside_a_running_one_says_where_that_is_and_changes_nothing(tmp_path: Path) -> None:
    running = Options(state_dir=tmp_path / "var", port=8123)
    with checks.only_one(running):
        before = sorted((tmp_path / "var").rglob("*"))
        answer = up(tmp_path / "var", PORT="8124")
        assert answer.returncode == ALREADY_RUNNING
        assert f"http://127.0.0.1:8123 (process {os.getpid()})" in answer.stderr
        assert sorted((tmp_path / "var").rglob("*")) == before
    with checks.only_one(running):
        pass  # free again


def test_the_lock_of_a_killed_start_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from allinone import checks; from allinone.options import Options\n"
        "with checks.only_one(Options(state_dir=Path(sys.argv[1]))): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=CHECKOUT, check=False, timeout=60)
    with checks.only_one(Options(state_dir=tmp_path)):
        pass


def test_too_little_room_on_the_disk_is_said_with_the_way_out(tmp_path: Path) -> None:
    more_than_there_is = shutil.disk_usage(tmp_path).total * 2
    with pytest.raises(Fault, match=r"MiB free, .* GPUYARD_STATE_DIR"):
        checks.disk_has_room(tmp_path, more_than_there_is)


@pytest.mark.parametrize(("number", "word"), [(errno.ENOSPC, "is full"), (errno.EROFS, "cannot be written")])
def test_a_disk_that_refuses_in_the_middle_is_a_sentence(tmp_path: Path, number: int, word: str) -> None:
    with pytest.raises(Fault, match=word), disk_errors_named(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_recognised_by_what_the_kernel_really_says() -> None:
    with pytest.raises(Fault, match="is full"), disk_errors_named(Path("/dev/full")):
        Path("/dev/full").write_text("x")


def test_nvidia_gpus_are_recognised_by_their_devices(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not checks.has_nvidia_gpus(tmp_path / "none", tmp_path)
    (tmp_path / "nvidia0").touch()
    assert checks.has_nvidia_gpus(tmp_path / "none", tmp_path)


@pytest.mark.parametrize(("card", "counts"), [
    ("0x1002 0x120000", True), ("0x1002 0x038000", True), ("0x1002 0x030000", False), ("0x10de 0x030200", False)])
def test_amd_gpus_are_recognised_by_what_they_are_on_the_bus(tmp_path: Path, card: str, counts: bool) -> None:
    vendor, kind = card.split()
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text(vendor + "\n")
    (tmp_path / "0000:01:00.0" / "class").write_text(kind + "\n")
    assert checks.has_amd_gpus(tmp_path) is counts
    assert not checks.has_amd_gpus(tmp_path / "none")


def test_assets_are_fingerprinted_by_what_they_are_made_of(tmp_path: Path) -> None:
    for name in assets.INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    before = assets.fingerprint(tmp_path)
    assert assets.fingerprint(tmp_path) == before
    (tmp_path / "package-lock.json").write_text("two")
    assert assets.fingerprint(tmp_path) != before


def test_static_files_are_collected_again_only_after_a_change(tmp_path: Path) -> None:
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "a.css").write_text("a")
    seen = assets.Freshness(tmp_path / "stamp", [tmp_path / "static"])
    assert not seen.unchanged()
    seen.remember()
    assert assets.Freshness(tmp_path / "stamp", [tmp_path / "static"]).unchanged()
    (tmp_path / "static" / "b.css").write_text("b")
    assert not assets.Freshness(tmp_path / "stamp", [tmp_path / "static"]).unchanged()


def test_an_address_for_every_interface_is_shown_as_one_that_a_browser_takes(tmp_path: Path) -> None:
    assert Options(state_dir=tmp_path, host="0.0.0.0", port=8001).url == "http://127.0.0.1:8001"
    assert Options(state_dir=tmp_path, host="::1", port=8001).url == "http://[::1]:8001"
