"""`python -m workers.join`: gives a node its key pair, then stores what the portal answered at enrolment."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from wire import names, signing
from workers.gpus import fault_script
from workers.settings import CONFIG_FILE, CONFIG_VARIABLE, KEY_FILE, SettingsError, broker_url, node_name, public_key
from workers.settings import read_private_key as private_key_at

ANSWER_KEYS = ("node", "portal_public_key", "broker_url", "protocol")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        if options.config is None:
            print(make_key(options.state_dir).hex())
        else:
            faults = checked(options.fault, options.simulate)
            path = store(options.state_dir, options.node, read_answer(options.config), options.simulate, faults)
            print(f"Wrote {path}. Start the node with {CONFIG_VARIABLE}={path} python -m workers.app", file=sys.stderr)
    except (SettingsError, OSError) as error:
        print(f"join: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.join", description=__doc__)
    parser.add_argument("--state-dir", required=True, type=lambda text: Path(text).absolute(),
                        help="where the node keeps its keys and the spool of its attempts")
    parser.add_argument("--node", required=True, type=str, help="the name under which the portal enrols it")
    parser.add_argument("--config", help="file with the JSON that `manage.py enroll` printed; - reads standard input")
    parser.add_argument("--simulate", metavar="TOPOLOGY", help="simulated GPUs instead of real ones, e.g. DGX-H100-8")
    parser.add_argument("--fault", metavar="SCRIPT", action="append", default=[],
                        help="what shall go wrong with simulated GPUs, e.g. gpu3:lost@60s; may be repeated")
    return parser.parse_args(argv)


def checked(scripts: list[str], simulate: str | None) -> str:
    """The fault script, once it is known that the simulated node has what it breaks."""
    script = " ".join(scripts)
    if script and not simulate:
        raise SettingsError("--fault breaks simulated GPUs only: name them with --simulate, e.g. DGX-H100-8")
    try:
        fault_script.check_on(fault_script.parse(script), simulate)
    except fault_script.ScriptError as error:
        raise SettingsError(str(error)) from error
    return script


def make_key(state_dir: Path) -> bytes:
    """-> the public key. A key that is already there is kept: the portal may know it."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = state_dir / KEY_FILE
    if not path.exists():
        write_private(path, signing.new_private_key())
    return signing.public_key_of(private_key_at(path))


def read_answer(source: str) -> dict[str, Any]:
    text = sys.stdin.read() if source == "-" else Path(source).read_text()
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"the portal's answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise SettingsError("the portal's answer must be one JSON object")
    missing = [key for key in ANSWER_KEYS if key not in answer]
    if missing:
        raise SettingsError(f"the portal's answer lacks {', '.join(missing)}; pass on what `manage.py enroll` printed")
    return answer


def store(state_dir: Path, node: str, answer: dict[str, Any], simulate: str | None, faults: str = "") -> Path:
    check(node, answer)
    private_key_at(state_dir / KEY_FILE)  # without its key the node could not start
    config = {key: answer[key] for key in ANSWER_KEYS} | {"state_dir": str(state_dir)}
    if simulate:
        config["simulate"] = simulate
    if faults:
        config["faults"] = faults
    path = state_dir / CONFIG_FILE
    write_private(path, json.dumps(config, indent=2).encode() + b"\n")
    return path


def check(node: str, answer: dict[str, Any]) -> None:
    if node_name(str(answer["node"])) != node_name(node):
        raise SettingsError(f"the portal enrolled node {answer['node']!r}, but --node says {node!r}")
    if answer["protocol"] != names.PROTOCOL:
        raise SettingsError(f"the portal speaks protocol {answer['protocol']!r}, this node {names.PROTOCOL}: "
                            "install the version of the portal")
    public_key(str(answer["portal_public_key"]))
    broker_url(str(answer["broker_url"]))


def write_private(path: Path, data: bytes) -> None:
    """Atomic, and never readable by others, not even for a moment."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
