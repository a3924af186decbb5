"""Settings of a node: `node.json` written at enrolment, environment variables above it, typed values out."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire import names

KEY_FILE = "node.key"
"""In the state directory: 32 raw bytes, readable by the node's account alone."""

CONFIG_FILE = "node.json"

CONFIG_VARIABLE = "GPUYARD_NODE_CONFIG"

VARIABLE_PREFIX = "GPUYARD_NODE_"
"""Of its own: on one machine with the portal, the portal's variables must not reach the node."""

HEX_KEY = re.compile(r"[0-9a-f]{64}")

BROKER_SCHEMES = ("redis://", "rediss://", "unix://")


class SettingsError(Exception):
    """A value that the node cannot start with; the message names its key."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    node: str
    state_dir: Path
    private_key: bytes
    portal_public_key: bytes
    broker_url: str
    simulate: str | None = None  # topology of simulated GPUs, e.g. DGX-H100-8; None: the machine's own
    faults: str = ""  # of simulated GPUs, as a script
    heartbeat_interval_s: float = 5.0
    sync_interval_s: float = 2.0
    telemetry_interval_s: float = 1.0
    poll_interval_s: float = 0.1  # of attempts and their logs
    deaf_after_s: float = 60.0
    job_path: str = ""  # PATH of jobs
    keep_work_days: float = 7.0  # files that a run left in a working directory of its own
    log_level: str = "INFO"

    @property
    def spool_root(self) -> Path:
        return self.state_dir / "spool"

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None) -> "Settings":
        """From the file GPUYARD_NODE_CONFIG names; GPUYARD_NODE_<FIELD> overrides one field. Raises SettingsError."""
        env = os.environ if env is None else env
        values = Values(env, config_path(env))
        state_dir = Path(values.text("state_dir"))
        if not state_dir.is_absolute():
            raise SettingsError(f"state_dir must be an absolute path, not {str(state_dir)!r}")
        return cls(
            node=node_name(values.text("node")),
            state_dir=state_dir,
            private_key=read_private_key(state_dir / KEY_FILE),
            portal_public_key=public_key(values.text("portal_public_key")),
            broker_url=broker_url(values.text("broker_url")),
            simulate=values.text("simulate", "") or None,
            faults=values.text("faults", ""),
            heartbeat_interval_s=values.seconds("heartbeat_interval_s", 5.0),
            sync_interval_s=values.seconds("sync_interval_s", 2.0),
            telemetry_interval_s=values.seconds("telemetry_interval_s", 1.0),
            poll_interval_s=values.seconds("poll_interval_s", 0.1),
            deaf_after_s=values.seconds("deaf_after_s", 60.0),
            keep_work_days=values.days("keep_work_days", 7.0),
            job_path=values.text("job_path", default_job_path()),
            log_level=log_level(values.text("log_level", "INFO")),
        )


class Values:
    """One place to look a key up: the environment first, then the file."""

    def __init__(self, env: Mapping[str, str], path: Path) -> None:
        self._env, self._path = env, path
        self._file = read_config(path)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._env.get(VARIABLE_PREFIX + key.upper(), self._file.get(key, default))
        if value is None:
            raise SettingsError(f"{key} is missing: set it in {self._path} or as {VARIABLE_PREFIX}{key.upper()}")
        if not isinstance(value, str | int | float):
            raise SettingsError(f"{key} in {self._path} must be text, not {value!r}")
        return str(value)

    def days(self, key: str, default: float) -> float:
        text = self.text(key, str(default))
        try:
            days = float(text)
        except ValueError:
            raise SettingsError(f"{key} must be a number of days, not {text!r}") from None
        if not 0 <= days <= 3650:
            raise SettingsError(f"{key} must lie between 0 and 3650 days, not {text!r}")
        return days

    def seconds(self, key: str, default: float) -> float:
        text = self.text(key, str(default))
        try:
            seconds = float(text)
        except ValueError:
            raise SettingsError(f"{key} must be a number of seconds, not {text!r}") from None
        if not 0.01 <= seconds <= 3600:
            raise SettingsError(f"{key} must lie between 0.01 and 3600 seconds, not {text!r}")
        return seconds


def config_path(env: Mapping[str, str]) -> Path:
    path = env.get(CONFIG_VARIABLE)
    if not path:
        raise SettingsError(f"{CONFIG_VARIABLE} is not set: it names the {CONFIG_FILE} that workers.join wrote")
    return Path(path)


def read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror}); workers.join writes it") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{path} must hold one JSON object")
    protocol = data.get("protocol", names.PROTOCOL)
    if protocol != names.PROTOCOL:
        raise SettingsError(f"protocol in {path} is {protocol!r}, this node speaks {names.PROTOCOL}: "
                            "install the version of the portal")
    return data


def read_private_key(path: Path) -> bytes:
    try:
        key = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"the private key {path} cannot be read ({error.strerror}): run workers.join") from error
    if mode & 0o077:
        raise SettingsError(f"the private key {path} can be read by others: run chmod 600 on it")
    if len(key) != 32:
        raise SettingsError(f"the private key {path} has {len(key)} bytes, not 32: remove it and run workers.join")
    return key


def node_name(text: str) -> str:
    if not names.NODE_NAME.fullmatch(text):
        raise SettingsError(f"node must be 1 to 63 of a-z, 0-9, dot and dash, not {text!r}")
    return text


def public_key(text: str) -> bytes:
    if not HEX_KEY.fullmatch(text):
        raise SettingsError("portal_public_key must be 64 hexadecimal digits, as `manage.py enroll` prints them")
    return bytes.fromhex(text)


def broker_url(text: str) -> str:
    if not text.startswith(BROKER_SCHEMES):
        raise SettingsError("broker_url must begin with redis://, rediss:// or unix://")
    return text


def log_level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SettingsError(f"log_level must be DEBUG, INFO, WARNING or ERROR, not {text!r}")
    return text.upper()


def default_job_path() -> str:
    """The interpreter of the node first, so that `python` and `torchrun` are found, then the system's programs."""
    return f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
