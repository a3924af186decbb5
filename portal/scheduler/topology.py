"""Which GPUs of one node go together: the best linked, leaving the rest as well linked as can be."""

from collections.abc import Sequence
from itertools import combinations
from math import comb

from portal.scheduler.snapshot import GpuView, NodeView

EXACT_UP_TO = 5000
"""Sets of GPUs that are looked at one by one: all of them for 8 of 14 cards; beyond it the best start is grown."""

XGMI = "XGMI"
"""AMD's direct link: what NVLink is to others. How many a pair has is not in its name."""

WEIGHTS = {XGMI: 100, "PIX": 50, "PXB": 40, "PHB": 30, "NODE": 20, "SYS": 10}
SWITCHED = frozenset({"PIX", "PXB"})

Matrix = list[list[int]]


def choose(node: NodeView, gpus: Sequence[GpuView], count: int, link: str = "any") -> tuple[GpuView, ...] | None:
    """-> `count` of `gpus` in index order, or None if no set is joined as `link` asks."""
    pool = sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid))
    if count > len(pool):
        return None
    allowed, weights = allowed_pairs(node, pool, link), weight_matrix(node, pool)
    picked = best_set(weights, allowed, count)
    return tuple(pool[position] for position in picked) if picked is not None else None


def largest_joined(node: NodeView, gpus: Sequence[GpuView], link: str) -> int:
    """-> how many of `gpus` are joined to each other as `link` asks, at most."""
    return next((count for count in range(len(gpus), 0, -1) if choose(node, gpus, count, link) is not None), 0)


def weight(kind: str) -> int:
    """A higher one is a faster link; more NVLinks weigh more."""
    if kind.startswith("NV"):
        return 100 + int(kind[2:] or 0)
    return WEIGHTS.get(kind, 0)


def joins(kind: str, link: str) -> bool:
    if link == "any":
        return True
    return kind.startswith("NV") or kind == XGMI or (link == "pcie-switch" and kind in SWITCHED)


def weight_matrix(node: NodeView, pool: Sequence[GpuView]) -> Matrix:
    return [[0 if a is b else weight(node.kind(a.uuid, b.uuid)) for b in pool] for a in pool]


def allowed_pairs(node: NodeView, pool: Sequence[GpuView], link: str) -> list[list[bool]]:
    return [[a is b or joins(node.kind(a.uuid, b.uuid), link) for b in pool] for a in pool]


def best_set(weights: Matrix, allowed: list[list[bool]], count: int) -> tuple[int, ...] | None:
    size = len(weights)
    if uniform(weights, allowed):
        return tuple(range(count)) if count < 2 or allowed[0][1] else None
    if comb(size, count) <= EXACT_UP_TO:
        candidates = [picked for picked in combinations(range(size), count) if all_allowed(allowed, picked)]
    else:
        candidates = [grown for seed in range(size) if (grown := grow(weights, allowed, seed, count)) is not None]
    return min(candidates, key=lambda picked: preference(weights, picked), default=None)


def uniform(weights: Matrix, allowed: list[list[bool]]) -> bool:
    """Every pair alike, as behind an NVSwitch: then nothing is to be weighed."""
    pairs = {(weights[a][b], allowed[a][b]) for a, b in combinations(range(len(weights)), 2)}
    return len(pairs) <= 1


def all_allowed(allowed: list[list[bool]], picked: tuple[int, ...]) -> bool:
    return all(allowed[a][b] for a, b in combinations(picked, 2))


def preference(weights: Matrix, picked: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    rest = [position for position in range(len(weights)) if position not in picked]
    return -inner(weights, picked), -inner(weights, rest), picked


def inner(weights: Matrix, positions: Sequence[int]) -> int:
    return sum(weights[a][b] for a, b in combinations(positions, 2))


def grow(weights: Matrix, allowed: list[list[bool]], seed: int, count: int) -> tuple[int, ...] | None:
    """From one GPU on, always add the one that is best linked to those already there."""
    picked = [seed]
    while len(picked) < count:
        open_to_all = [
            position for position in range(len(weights))
            if position not in picked and all(allowed[position][other] for other in picked)
        ]
        if not open_to_all:
            return None
        picked.append(max(open_to_all, key=lambda p: (sum(weights[p][other] for other in picked), -p)))
    return tuple(sorted(picked))
