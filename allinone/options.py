"""What a person can set, from the environment: typed, checked, and named when wrong."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from allinone.faults import USAGE, Fault

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_PORT = 8000
SIMULATED = "DGX-H100-8"
NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Options:
    state_dir: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    database_url: str = ""  # empty: an embedded server
    redis_url: str = ""  # empty: an embedded server
    node: str = "node1"
    simulate: str = ""  # topology; empty: what the machine has
    faults: str = ""  # of the simulated GPUs
    public_url: str = ""
    exit_after_demo: bool = False

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in {"0.0.0.0", "::"} else self.host  # noqa: S104 -- compared, not bound
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None) -> "Options":
        env = os.environ if env is None else env

        def text(key: str, default: str = "") -> str:
            return env.get(key, "").strip() or default

        return cls(
            state_dir=Path(text("GPUYARD_STATE_DIR", str(CHECKOUT / "var"))).absolute(),
            host=text("HOST", "127.0.0.1"),
            port=port(text("PORT", str(DEFAULT_PORT))),
            database_url=address("DATABASE_URL", text("DATABASE_URL"), {"postgresql", "postgres"}),
            redis_url=address("REDIS_URL", text("REDIS_URL"), {"redis", "rediss", "unix"}),
            node=node_name(text("GPUYARD_NODE_NAME", "node1")),
            simulate=text("GPUYARD_SIMULATE"),
            faults=text("GPUYARD_FAULTS"),
            public_url=address("GPUYARD_PUBLIC_URL", text("GPUYARD_PUBLIC_URL"), {"http", "https"}),
            exit_after_demo=flag("DEMO_EXIT", text("DEMO_EXIT")),
        )


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise Fault(f"PORT={text} is not a port: write a number from 1 to 65535, as in PORT=8001.", USAGE)
    return int(text)


def address(key: str, text: str, schemes: set[str]) -> str:
    """The error never repeats the value: it may hold a password."""
    if not text:
        return ""
    example = {
        "DATABASE_URL": "postgresql://user:password@host:5432/name",
        "REDIS_URL": "redis://:password@host:6379/0",
    }
    way_out = f"write it like {example.get(key, 'https://gpuyard.example.org')}, or leave it out."
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 -- a wrong port is noticed only when it is asked for
    except ValueError as error:
        raise Fault(f"{key} is not an address ({error}): {way_out}", USAGE) from error
    if parts.scheme not in schemes:
        raise Fault(f"{key} does not begin with {sorted(schemes)[0]}://: {way_out}", USAGE)
    if key == "DATABASE_URL" and not parts.path.strip("/"):
        raise Fault(f"{key} names no database: {way_out}", USAGE)
    return text


def node_name(text: str) -> str:
    if not NODE.fullmatch(text):
        raise Fault(f"GPUYARD_NODE_NAME={text} is not a node's name: 1 to 63 of a-z, 0-9, dot and dash.", USAGE)
    return text


def flag(key: str, text: str) -> bool:
    if text.lower() not in {"", "0", "1", "no", "yes", "false", "true"}:
        raise Fault(f"{key}={text} is neither yes nor no: write {key}=1 or leave it out.", USAGE)
    return text.lower() in {"1", "yes", "true"}
