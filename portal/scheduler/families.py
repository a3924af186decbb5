"""GPU model names: what drivers call a card, and what people call it."""

import re
from functools import lru_cache

MAKERS = frozenset({"NVIDIA", "AMD", "TESLA", "GEFORCE", "QUADRO", "INSTINCT", "RADEON", "GRAPHICS", "DEVICE"})
BUILD = re.compile(r"\d+GB|SXM\d*|PCIE|NVL|HBM\w*|OAM|GENERATION|EDITION|SERVER|WORKSTATION|MIG|\d+G\.\d+GB")
SEPARATORS = re.compile(r"[\s_/-]+")


def words(name: str) -> list[str]:
    return [word for word in SEPARATORS.split(name.strip()) if word]


@lru_cache(maxsize=1024)
def family(name: str) -> str:
    """-> the name without maker, memory size and form: "NVIDIA A100-SXM4-80GB" -> "A100"."""
    kept = [word for word in words(name) if word.upper() not in MAKERS and not BUILD.fullmatch(word.upper())]
    return "-".join(kept or words(name)) or "unknown"


@lru_cache(maxsize=4096)
def matches(wish: str, name: str) -> bool:
    """Every word of the wish is a word of the driver's name: A100, A100-80GB, RTX-4090 and 4090 all find theirs."""
    have = {word.upper() for word in words(name)}
    want = [word.upper() for word in words(wish)]
    return bool(want) and all(word in have for word in want)
