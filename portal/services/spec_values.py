"""The small languages of a specification: sizes, durations, names, environment variables. Pure; ValueError says why."""

import re
import shlex
import unicodedata
from typing import Any

from portal.hardware import mig

MAX_COMMAND_BYTES = 32 * 1024
MAX_WORDS = 4096
MAX_NAME = 200
MAX_ENV_VARIABLES = 256
MAX_ENV_VALUE_BYTES = 32 * 1024
MAX_ENV_BYTES = 128 * 1024
MAX_DEPTH = 12

SIZE_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}
SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([KMGT]?i?B)", re.IGNORECASE)
DURATION = re.compile(r"(?:(\d{1,4})d)?\s*(?:(\d{1,5})h)?\s*(?:(\d{1,6})m)?\s*(?:(\d{1,8})s)?")
DURATION_PARTS = (86_400, 3_600, 60, 1)

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
RESERVED_ENV = frozenset({
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_PRELOAD",
    "LD_AUDIT",
})  # fmt: skip
RESERVED_ENV_PREFIXES = ("NVIDIA_", "GPUYARD_")
TORCHRUN_ENV = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
TORCHRUN_PREFIX = "TORCHELASTIC_"

BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def size_bytes(value: Any) -> int:
    """"24GB", "24 GiB", "1.5TB" -> bytes."""
    found = SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError("write a size with its unit, such as 24GB or 40GiB")
    count = round(float(found[1]) * SIZE_UNITS[found[2].upper()])
    if not 0 < count <= 10**15:
        raise ValueError("a size lies between 1B and 1000TB")
    return count


def size_text(count: int) -> str:
    """Bytes -> the shortest text that reads back as the same number."""
    for unit in ("TB", "GB", "TIB", "GIB", "MB", "MIB", "KB", "KIB"):
        if count % SIZE_UNITS[unit] == 0:
            return f"{count // SIZE_UNITS[unit]}{unit.replace('I', 'i')}"
    return f"{count}B"


def duration_s(value: Any) -> int:
    """"90s", "30m", "12h", "2d", "1h30m" -> seconds."""
    found = DURATION.fullmatch(value.strip()) if isinstance(value, str) and value.strip() else None
    if found is None:
        raise ValueError("write a duration with its unit, such as 90s, 30m, 12h or 2d")
    return sum(int(part or 0) * seconds for part, seconds in zip(found.groups(), DURATION_PARTS, strict=True))


def duration_text(seconds: int) -> str:
    for unit, length in zip("dhms", DURATION_PARTS, strict=True):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def job_name(value: str) -> str:
    name = value.strip()
    if not name:
        raise ValueError("write a name, or leave it out")
    if len(name) > MAX_NAME:
        raise ValueError(f"at most {MAX_NAME} characters; this has {len(name)}")
    if any(unicodedata.category(char) in {"Cc", "Cf", "Zl", "Zp"} or char in BIDI for char in name):
        raise ValueError("no line breaks, control characters or writing-direction marks")
    return name


def command_words(command: str) -> list[str]:
    """The argv that will run. No shell ever reads it."""
    if len(command.encode()) > MAX_COMMAND_BYTES:
        raise ValueError(f"at most {MAX_COMMAND_BYTES // 1024} KiB")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from error
    if not words or not words[0]:
        raise ValueError("write what is to be run, such as train.py --epochs 1")
    if len(words) > MAX_WORDS:
        raise ValueError(f"at most {MAX_WORDS} words; this has {len(words)}")
    return words


def environment(env: dict[str, str]) -> dict[str, str]:
    if len(env) > MAX_ENV_VARIABLES:
        raise ValueError(f"at most {MAX_ENV_VARIABLES} variables; these are {len(env)}")
    for name, value in env.items():
        check_variable(name, value)
    if sum(len(name.encode()) + len(value.encode()) + 2 for name, value in env.items()) > MAX_ENV_BYTES:
        raise ValueError(f"at most {MAX_ENV_BYTES // 1024} KiB in all")
    return env


def check_variable(name: str, value: str) -> None:
    shown = name if len(name) <= 60 else name[:60] + "…"
    if not ENV_NAME.fullmatch(name):
        raise ValueError(f"{shown!r} is not a variable name: letters, digits and _ only, no digit first")
    if name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES):
        raise ValueError(f"{shown} is reserved and cannot be given")
    if len(value.encode()) > MAX_ENV_VALUE_BYTES:
        raise ValueError(f"{shown} is longer than {MAX_ENV_VALUE_BYTES // 1024} KiB")


def unstorable(value: Any, field: str = "", depth: int = 0) -> str | None:
    """-> the field that holds what no text may hold (NUL, half a surrogate pair) or is nested too deeply."""
    if depth > MAX_DEPTH:
        return field
    if isinstance(value, str):
        return field if "\x00" in value or any("\ud800" <= char <= "\udfff" for char in value) else None
    if isinstance(value, dict):
        pairs = [(key if isinstance(key, str) else repr(key), key, item) for key, item in value.items()]
        parts = [found for name, key, item in pairs for found in (
            unstorable(key, field or "the specification", depth + 1), unstorable(item, dotted(field, name), depth + 1))]
    elif isinstance(value, list):
        parts = [unstorable(item, dotted(field, str(number)), depth + 1) for number, item in enumerate(value)]
    else:
        return None
    return next((found for found in parts if found is not None), None)


def dotted(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def mig_profile(value: str) -> str:
    """-> the profile of one slice, as drivers write it."""
    try:
        found = mig.parse(value)
    except mig.Unreadable:
        found = ()
    if len(found) != 1:
        raise ValueError("write one profile, such as 1g.10gb; resources.gpus says how many")
    return found[0]


def check_slices(launcher: str, count: int, link: str) -> None:
    """A process sees one slice at most, and slices have no way to each other."""
    if count == 0:
        raise ValueError("resources.gpus: 0 slices are none; ask for 1, or leave mig out")
    if count > 1 and launcher == "torchrun":
        raise ValueError(
            "resources.gpus: ranks on different MIG slices cannot train together, as NCCL does not span slices; "
            "ask for 1 slice, or for whole GPUs without mig"
        )
    if count > 1:
        raise ValueError(
            "resources.gpus: a process sees one MIG slice only, so a job has 1; "
            "submit a job for each slice, or ask for whole GPUs without mig"
        )
    if link != "any":
        raise ValueError(f"resources.link: MIG slices have no links, so {link} cannot be had; leave it out")
