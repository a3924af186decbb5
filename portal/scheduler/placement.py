"""Finding the GPUs for one request: all of it or nothing, one model per job, the fullest nodes that fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from portal.scheduler.decisions import Placement
from portal.scheduler.snapshot import GpuView, Needs, NodeView
from portal.scheduler.topology import choose

Pools = Mapping[str, Sequence[GpuView]]
"""Node name -> the GPUs of it that may be taken."""


@dataclass(frozen=True)
class Option:
    """One way to place the request, and how good it is: lower is better."""

    placements: tuple[Placement, ...]
    cost: tuple[int, int, str]


def place(needs: Needs, nodes: Sequence[NodeView], pools: Pools) -> tuple[Placement, ...] | None:
    """-> where the whole request goes, on as few nodes as it allows, or None."""
    for node_count, per_node in needs.splits():
        split = (node_count, per_node)
        found = place_split(needs, split, nodes, pools) if per_node else place_bare(node_count, nodes)
        if found is not None:
            return found
    return None


def place_bare(node_count: int, nodes: Sequence[NodeView]) -> tuple[Placement, ...] | None:
    """A request without GPUs goes where the least runs."""
    calm = sorted(nodes, key=lambda node: (node.busy_shares, node.name))[:node_count]
    return tuple(Placement(node.name, ()) for node in calm) if len(calm) == node_count else None


def place_split(
    needs: Needs, split: tuple[int, int], nodes: Sequence[NodeView], pools: Pools
) -> tuple[Placement, ...] | None:
    options = [
        option
        for name in names_in(needs, nodes, pools)
        if (option := place_model(needs, name, split, nodes, pools)) is not None
    ]
    best = min(options, key=lambda option: option.cost, default=None)
    return best.placements if best else None


def place_model(
    needs: Needs, name: str, split: tuple[int, int], nodes: Sequence[NodeView], pools: Pools
) -> Option | None:
    node_count, per_node = split
    usable = {node.name: of_model(needs, name, pools.get(node.name, ())) for node in nodes}
    roomy = [node for node in nodes if len(usable[node.name]) >= per_node]
    placements: list[Placement] = []
    left_over = 0
    for node in sorted(roomy, key=lambda node: (len(usable[node.name]), node.name)):
        chosen = choose(node, usable[node.name], per_node, needs.link)
        if chosen is not None:
            placements.append(Placement(node.name, tuple(gpu.uuid for gpu in chosen)))
            left_over += len(usable[node.name]) - per_node
        if len(placements) == node_count:
            return Option(tuple(placements), (needs.rank_of(name), left_over, placements[0].node + name))
    return None


def names_in(needs: Needs, nodes: Iterable[NodeView], pools: Pools) -> list[str]:
    """-> the model names, as drivers say them, that the request accepts."""
    return sorted({gpu.name for node in nodes for gpu in pools.get(node.name, ()) if needs.accepts(gpu)})


def of_model(needs: Needs, name: str, gpus: Sequence[GpuView]) -> list[GpuView]:
    return [gpu for gpu in gpus if gpu.name == name and needs.accepts(gpu)]


def claimable(needs: Needs, nodes: Sequence[NodeView], pools: Pools) -> list[GpuView]:
    """-> every GPU that could be part of a placement once it is free. Empty: these nodes can never host the request."""
    for node_count, per_node in needs.splits():
        found = [
            gpu
            for name in names_in(needs, nodes, pools)
            for gpu in hosts_of_model(needs, name, (node_count, per_node), nodes, pools)
        ]
        if found:
            return found
    return []


def hosts_of_model(
    needs: Needs, name: str, split: tuple[int, int], nodes: Sequence[NodeView], pools: Pools
) -> list[GpuView]:
    node_count, per_node = split
    groups = [(node, of_model(needs, name, pools.get(node.name, ()))) for node in nodes]
    able = [group for node, group in groups if choose(node, group, per_node, needs.link) is not None]
    return [gpu for group in able for gpu in group] if len(able) >= node_count else []
