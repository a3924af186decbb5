"""Cutting a card into MIG slices: what is asked for, whether a board allows it, where each slice goes.

A wish is a multiset of profile names; a layout is slices with their starts. A board allows at most so many compute
slices, never the same memory slot twice, each profile only at its own starts and only so often.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from portal.hardware.boards import Board, Profile

MAX_WISH = 64
OFF = frozenset({"", "off", "none", "disabled", "all-disabled"})
TERM = re.compile(r"(?:(\d{1,3})\s*[x×*]\s*)?(\d{1,2}g\.\d{1,4}gb(?:\+[a-z.]{1,12})?)(?:\s*[x×*]\s*(\d{1,3}))?")
SEPARATOR = re.compile(r"[\s,;]+(?:\+\s+)?|\s*\+\s+|\+(?=\d)")
AROUND_TIMES = re.compile(r"\s*([x×*])\s*(?=\d)")

Wish = tuple[str, ...]
"""Names of profiles, the largest first."""


class Unreadable(ValueError):
    """The sentence says what is not understood, and how it is written."""


@dataclass(frozen=True, order=True)
class Slice:
    start: int
    profile: str


Layout = tuple[Slice, ...]


@dataclass(frozen=True)
class Near:
    """A legal wish close to one that is not, and how it differs in words."""

    wish: Wish
    text: str  # "4g.40gb + 3g.40gb"
    change: str  # "3g.40gb in place of one 4g.40gb"


@dataclass(frozen=True)
class Plan:
    layout: Layout
    kept: Layout
    destroyed: Layout
    created: Layout

    @property
    def changes(self) -> bool:
        return bool(self.destroyed or self.created)


class Illegal(ValueError):
    def __init__(self, reason: str, nearest: tuple[Near, ...]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.nearest = nearest


# --- reading and writing ----------------------------------------------------------------------------------------------


def parse(text: str) -> Wish:
    """-> the profiles of "3 × 2g.20gb + 1g.10gb", "2g.20gb,2g.20gb" or "off". Raises Unreadable."""
    plain = AROUND_TIMES.sub(r"\1", text.strip().lower())
    if plain in OFF:
        return ()
    names: list[str] = []
    for word in SEPARATOR.split(plain):
        names += term(word)
        if len(names) > MAX_WISH:
            raise Unreadable(f"more than {MAX_WISH} slices; a card has at most 7.")
    return tuple(names)


def term(word: str) -> list[str]:
    found = TERM.fullmatch(word)
    if found is None or (found[1] and found[3]):
        raise Unreadable(f"{word[:40]!r} is not a slice; write it like 3 × 2g.20gb + 1g.10gb, or off.")
    return [found[2]] * int(found[1] or found[3] or 1)


def read(board: Board, wanted: str | Iterable[str] | Mapping[str, int]) -> Wish:
    """-> the wish, however it is written: text, a list, counts by profile, or the name of a preset of this board."""
    if isinstance(wanted, str):
        named = presets(board).get(wanted.strip().lower())
        return in_order(board, named if named is not None else parse(wanted))
    if isinstance(wanted, Mapping):
        wanted = [f"{count}x{name}" for name, count in wanted.items()]
    return in_order(board, parse(", ".join(wanted)))


def text_of(wish: Iterable[str]) -> str:
    """-> "2 × 3g.40gb + 1g.10gb"."""
    counts = Counter(wish)
    return " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items()) or "off"


def in_order(board: Board, names: Iterable[str]) -> Wish:
    rank = {profile.name: place for place, profile in enumerate(board.profiles)}
    return tuple(sorted(names, key=lambda name: (-rank.get(name, len(rank)), name)))


@lru_cache(maxsize=64)
def presets(board: Board) -> dict[str, Wish]:
    """Layouts by the names that administrators know them by: all-1g.10gb, all-balanced, all-disabled."""
    plain = [profile for profile in board.profiles if not profile.has_media]
    found: dict[str, Wish] = {"all-disabled": ()}
    found |= {f"all-{profile.name}": (profile.name,) * profile.most for profile in plain}
    small = {slices: profile for profile in reversed(plain) for slices in [profile.slices]}
    shares = {7: (3, 2, 1, 1), 4: (2, 1, 1)}.get(board.slices, ())
    if shares and all(slices in small for slices in shares):
        found["all-balanced"] = in_order(board, [small[slices].name for slices in shares])
    return found


# --- what a board allows ----------------------------------------------------------------------------------------------


def check(board: Board, layout: Sequence[Slice]) -> str | None:
    """-> why these slices cannot stand where they are; None if they can."""
    for piece in layout:
        profile = board.by_name.get(piece.profile)
        if profile is None:
            return no_such_profile(board, piece.profile)
        if piece.start not in profile.starts:
            places = ", ".join(map(str, profile.starts))
            return f"{piece.profile} cannot start at memory slot {piece.start}; it may start at {places}."
    covered = Counter(slot for piece in layout for slot in slots_of(board, piece))
    doubled = [slot for slot, count in sorted(covered.items()) if count > 1]
    if doubled:
        return f"memory slot {doubled[0]} would belong to {covered[doubled[0]]} slices."
    return too_much(board, [piece.profile for piece in layout])


def why_not(board: Board, wish: Sequence[str]) -> str | None:
    """-> why a card of this kind cannot be cut so, wherever the slices go; None if it can."""
    for name in wish:
        if name not in board.by_name:
            return no_such_profile(board, name)
    reason = too_much(board, wish)
    if reason is not None:
        return reason
    if next(placements(board, wish), None) is not None:
        return None
    needed = sum(board.by_name[name].size for name in wish)
    if needed > board.slots:
        return f"{text_of(wish)} needs {needed} of {board.slots} memory slots."
    return f"{text_of(wish)} cannot be placed: the larger slices start only at fixed places and leave no room."


def too_much(board: Board, wish: Sequence[str]) -> str | None:
    counts = Counter(wish)
    for name, count in counts.items():
        most = board.by_name[name].most
        if count > most:
            return f"{count} × {name}: a card has room for {most}."
    media = sum(count for name, count in counts.items() if board.by_name[name].has_media)
    if media > 1:
        return f"{media} slices with +me: a card has these engines once."
    total = sum(board.by_name[name].slices for name in wish)
    return f"{text_of(wish)} needs {total} of {board.slices} compute slices." if total > board.slices else None


def no_such_profile(board: Board, name: str) -> str:
    return f"there is no {name} on this card; there are: {', '.join(profile.name for profile in board.profiles)}."


@lru_cache(maxsize=64)
def legal(board: Board) -> tuple[Wish, ...]:
    """-> every wish that a board allows, each once, except to switch MIG off."""
    found = {in_order(board, [piece.profile for piece in layout]) for layout in all_layouts(board)}
    return tuple(sorted(found - {()}, key=lambda wish: (len(wish), wish)))


def maximal(board: Board) -> tuple[Wish, ...]:
    """-> those to which nothing can be added, wherever their slices go."""
    every = [Counter(wish) for wish in legal(board)]
    return tuple(wish for wish in legal(board) if not any(Counter(wish) < other for other in every))


def all_layouts(board: Board) -> Iterator[Layout]:
    """Every way to cut a card, the uncut one too."""
    yield from grown(board, (), 0)


def grown(board: Board, layout: Layout, slot: int) -> Iterator[Layout]:
    if slot >= board.slots:
        yield layout
        return
    yield from grown(board, layout, slot + 1)
    for profile in board.profiles:
        piece = Slice(slot, profile.name)
        if slot in profile.starts and too_much(board, [*(one.profile for one in layout), profile.name]) is None:
            yield from grown(board, (*layout, piece), slot + profile.size)


# --- where slices go --------------------------------------------------------------------------------------------------


def plan(board: Board, wish: Sequence[str], existing: Sequence[Slice] = ()) -> Plan:
    """-> the layout that leaves most of what exists where it is. Raises Illegal with the nearest legal wishes."""
    reason = why_not(board, wish)
    if reason is not None:
        raise Illegal(reason, nearest(board, wish))
    before = frozenset(existing)
    layout = max(placements(board, wish), key=lambda one: goodness(board, one, before))
    after = frozenset(layout)
    return Plan(layout, *(tuple(sorted(part)) for part in (after & before, before - after, after - before)))


def placements(board: Board, wish: Sequence[str]) -> Iterator[Layout]:
    """Every way to place a wish. Equal profiles are not told apart."""
    names = sorted(wish, key=lambda name: (-board.by_name[name].size, name))
    if too_much(board, names) is None:
        yield from placed(board, names, (), frozenset())


def placed(board: Board, names: list[str], layout: Layout, taken: frozenset[int]) -> Iterator[Layout]:
    if not names:
        yield tuple(sorted(layout))
        return
    profile = board.by_name[names[0]]
    after = layout[-1].start if layout and layout[-1].profile == profile.name else -1
    for start in profile.starts:
        covered = frozenset(range(start, start + profile.size))
        if start > after and not covered & taken:
            yield from placed(board, names[1:], (*layout, Slice(start, profile.name)), taken | covered)


def goodness(board: Board, layout: Layout, existing: frozenset[Slice]) -> tuple[int, int, int, Layout]:
    """First keep what exists, then leave the most room for what may come."""
    kept = [board.by_name[piece.profile].slices for piece in layout if piece in existing]
    taken = {slot for piece in layout for slot in slots_of(board, piece)}
    room = sum(profile.slices * len(free_starts(profile, taken)) for profile in board.profiles)
    return len(kept), sum(kept), room, layout


def free_starts(profile: Profile, taken: set[int]) -> list[int]:
    return [start for start in profile.starts if taken.isdisjoint(range(start, start + profile.size))]


def slots_of(board: Board, piece: Slice) -> range:
    return range(piece.start, piece.start + board.by_name[piece.profile].size)


def room(board: Board, layout: Sequence[Slice]) -> dict[str, int]:
    """-> how many more slices of each profile fit beside these, each profile by itself."""
    return {profile.name: more_of(board, profile, list(layout)) for profile in board.profiles}


def more_of(board: Board, profile: Profile, layout: list[Slice]) -> int:
    taken = {slot for piece in layout for slot in slots_of(board, piece)}
    count = 0
    for start in profile.starts:  # those of one profile lie side by side, so the first free ones are the most
        piece = Slice(start, profile.name)
        if taken.isdisjoint(slots_of(board, piece)) and check(board, [*layout, piece]) is None:
            layout, count = [*layout, piece], count + 1
            taken.update(slots_of(board, piece))
    return count


# --- the nearest legal wish -------------------------------------------------------------------------------------------


def nearest(board: Board, wish: Sequence[str], most: int = 3) -> tuple[Near, ...]:
    """-> the legal wishes that differ least, the best first; never empty for a board with profiles."""
    known = in_order(board, [name if name in board.by_name else similar(board, name) for name in wish])
    ranked = sorted(legal(board), key=lambda other: (distance(board, known, other), -len(other), other))
    return tuple(Near(other, text_of(other), difference(board, wish, other)) for other in ranked[:most])


def similar(board: Board, name: str) -> str:
    """-> the profile of this board that is most like one of another board."""
    numbers = [int(digits) for digits in re.findall(r"\d+", name)] + [0, 0]

    def unlike(profile: Profile) -> tuple[int, bool, int]:
        memory_gb = int(re.findall(r"\d+", profile.name)[1])
        media = profile.has_media != name.endswith("+me")
        return abs(profile.slices - numbers[0]), media, abs(memory_gb - numbers[1])

    return min(board.profiles, key=unlike).name


def distance(board: Board, wish: Sequence[str], other: Sequence[str]) -> float:
    """In compute slices: another profile in the place of one costs what they differ, one fewer or more its size."""
    pairs, lost, added = matched(board, wish, other)
    swapped = sum(0.75 + abs(board.by_name[a].slices - board.by_name[b].slices) for a, b in pairs)
    return swapped + sum(board.by_name[name].slices for name in [*lost, *added])


def matched(
    board: Board, wish: Sequence[str], other: Sequence[str]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """-> (profiles that stand for each other, those that are gone, those that are new)."""
    lost = in_order(board, (Counter(wish) - Counter(other)).elements())
    added = in_order(board, (Counter(other) - Counter(wish)).elements())
    common = min(len(lost), len(added))
    return list(zip(lost, added, strict=False)), list(lost[common:]), list(added[common:])


def difference(board: Board, wish: Sequence[str], other: Sequence[str]) -> str:
    pairs, lost, added = matched(board, wish, other)
    swaps = Counter(pairs)
    words = [
        f"{new if count == 1 else f'{count} × {new}'} in place of {'one' if count == 1 else count} {old}"
        for (old, new), count in swaps.items()
    ]
    words += [f"{'one' if count == 1 else count} {name} fewer" for name, count in Counter(lost).items()]
    words += [f"{'one' if count == 1 else count} {name} more" for name, count in Counter(added).items()]
    return ", ".join(words)
