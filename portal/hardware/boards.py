"""Which boards can be cut into MIG slices, and into which. A board is found by its name and memory."""

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

GIB = 1024**3
WORDS = re.compile(r"[^A-Z0-9]+")


@dataclass(frozen=True)
class Profile:
    """A kind of slice. `starts` are the memory slots where it may begin, `size` how many it covers."""

    name: str  # 1g.10gb
    slices: int  # of the board's compute slices
    memory_mib: int
    most: int  # instances of it on one card
    size: int
    starts: tuple[int, ...]

    @property
    def has_media(self) -> bool:
        """Holds the engines of which a card has one."""
        return self.name.endswith("+me")


@dataclass(frozen=True)
class Board:
    name: str
    slices: int
    slots: int
    profiles: tuple[Profile, ...]  # smallest first

    @cached_property
    def by_name(self) -> dict[str, Profile]:
        return {profile.name: profile for profile in self.profiles}

    @cached_property
    def largest(self) -> Profile:
        return max(self.profiles, key=lambda profile: (profile.slices, profile.memory_mib))


@dataclass(frozen=True)
class Known:
    """How a board of the tables is recognised."""

    board: Board
    words: frozenset[str]
    memory_gib: tuple[float, float]


@lru_cache(maxsize=256)
def find(name: str, memory_bytes: int | None) -> Board | None:
    """-> the board of this card; None if it is not in the tables, or could be either of two."""
    words = set(WORDS.split(name.upper()))
    found = [known for known in TABLES if known.words & words and fits(known, memory_bytes)]
    return found[0].board if len(found) == 1 else None


def named(name: str) -> Board:
    return next(known.board for known in TABLES if known.board.name == name)


def fits(known: Known, memory_bytes: int | None) -> bool:
    least, most = known.memory_gib
    return memory_bytes is None or least <= memory_bytes / GIB <= most


def board_of(name: str, entry: dict[str, Any]) -> Board:
    profiles = [
        Profile(row["name"], row["slices"], row["memory_mib"], row["most"], row["size"], tuple(row["starts"]))
        for row in entry["profiles"]
    ]
    return Board(name, entry["slices"], entry["slots"], in_order(profiles))


def in_order(profiles: list[Profile]) -> tuple[Profile, ...]:
    return tuple(sorted(profiles, key=lambda profile: (profile.slices, profile.size, profile.memory_mib, profile.name)))


def read_tables() -> tuple[Known, ...]:
    entries = json.loads(Path(__file__).with_name("mig.json").read_text(encoding="utf-8"))["boards"]
    return tuple(
        Known(board_of(name, entry), frozenset(entry["words"]), tuple(entry["memory_gib"]))
        for name, entry in entries.items()
    )


TABLES = read_tables()
