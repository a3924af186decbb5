"""What a node is told about itself, and what it says when that is wrong."""

import io
import json
import stat
from pathlib import Path

import pytest

from wire import names, signing
from workers import join
from workers.settings import Settings, SettingsError

PORTAL_KEY = signing.public_key_of(signing.new_private_key()).hex()


def answer(**changes: object) -> dict[str, object]:
    return {"node": "node1", "portal_public_key": PORTAL_KEY, "broker_url": "redis://node1:secret@broker:6379/0",
            "protocol": names.PROTOCOL} | changes


def joined(home: Path, **changes: object) -> dict[str, str]:
    join.make_key(home)
    join.store(home, "node1", answer(), simulate=None)
    path = home / "node.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return {"GPUYARD_NODE_CONFIG": str(path)}


def test_a_joined_node_knows_its_name_its_keys_and_its_broker(tmp_path: Path) -> None:
    settings = Settings.load(joined(tmp_path))
    assert (settings.node, settings.broker_url) == ("node1", "redis://node1:secret@broker:6379/0")
    assert settings.portal_public_key.hex() == PORTAL_KEY
    assert signing.public_key_of(settings.private_key) == join.make_key(tmp_path)
    assert settings.simulate is None and settings.heartbeat_interval_s == 5.0


def test_the_environment_stands_above_the_file(tmp_path: Path) -> None:
    env = joined(tmp_path) | {"GPUYARD_NODE_SIMULATE": "DGX-H100-8", "GPUYARD_NODE_SYNC_INTERVAL_S": "0.5",
                              "GPUYARD_STATE_DIR": "/the/portal/s"}
    settings = Settings.load(env)
    assert (settings.simulate, settings.sync_interval_s) == ("DGX-H100-8", 0.5)
    assert settings.state_dir == tmp_path, "the portal's own variable of that name means nothing here"


@pytest.mark.parametrize(("key", "value"), [
    ("node", "Node One"), ("portal_public_key", "abc"), ("broker_url", "amqp://broker"), ("state_dir", "relative/path"),
    ("heartbeat_interval_s", "soon"), ("sync_interval_s", "0"), ("telemetry_interval_s", "nan"), ("log_level", "LOUD"),
    ("node", ["a list"]), ("protocol", 99),
])
def test_a_wrong_value_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=key):
        Settings.load(joined(tmp_path, **{key: value}))


def test_a_missing_file_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="GPUYARD_NODE_CONFIG is not set"):
        Settings.load({})
    with pytest.raises(SettingsError, match=r"cannot be read.*workers\.join"):
        Settings.load({"GPUYARD_NODE_CONFIG": str(tmp_path / "none.json")})


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    env = joined(tmp_path)
    (tmp_path / "node.key").chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        Settings.load(env)


def test_joining_keeps_the_key_and_hides_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    state_dir = str(tmp_path / "state")
    assert join.main(["--state-dir", state_dir, "--node", "node1"]) == 0
    first = capsys.readouterr().out
    assert join.main(["--state-dir", state_dir, "--node", "node1"]) == 0
    assert capsys.readouterr().out == first and len(bytes.fromhex(first.strip())) == 32

    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(answer())))
    arguments = ["--state-dir", state_dir, "--node", "node1", "--config", "-", "--simulate", "DGX-H100-8"]
    assert join.main(arguments) == 0
    files = [Path(state_dir) / name for name in ("node.key", "node.json")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]
    assert Settings.load({"GPUYARD_NODE_CONFIG": str(files[1])}).simulate == "DGX-H100-8"


@pytest.mark.parametrize(("wrong", "named"), [
    (answer(node="node2"), "node2"), (answer(protocol=2), "protocol"),
    (answer(portal_public_key="x"), "portal_public_key"), ({"node": "node1"}, "broker_url"), ([], "JSON object"),
])
def test_an_answer_that_does_not_fit_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                   wrong: object, named: str) -> None:
    join.make_key(tmp_path)
    source = tmp_path / "answer.json"
    source.write_text(json.dumps(wrong))
    assert join.main(["--state-dir", str(tmp_path), "--node", "node1", "--config", str(source)]) == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "node.json").exists()
