"""The sentences of the scheduler: what blocks, and how much is missing."""

from collections.abc import Sequence

from portal.scheduler.families import matches
from portal.scheduler.placement import Pools, names_in, of_model
from portal.scheduler.snapshot import GpuView, Needs, NodeView
from portal.scheduler.topology import largest_joined

GB = 1_000_000_000
TROUBLES_NAMED = 3
LINK_WORDS = {"nvlink": "NVLink", "pcie-switch": "one PCIe switch or NVLink"}


def asked(needs: Needs) -> str:
    """-> "8 H100", "4 A100 or H100 with at least 40 GB each, joined by NVLink", "16 GPUs on 2 nodes"."""
    if needs.gpus == 0:
        return "a node" if needs.nodes_min == 1 else f"{needs.nodes_min} nodes"
    parts = [f"{needs.gpus} {kind_word(needs, needs.gpus)}"]
    if needs.nodes_min > 1:
        parts.append(f" on {needs.nodes_min} nodes")
    if needs.memory_bytes is not None:
        parts.append(f" with at least {needs.memory_bytes / GB:.4g} GB{' each' if needs.gpus > 1 else ''}")
    if needs.link in LINK_WORDS and needs.gpus > 1:
        parts.append(f", joined by {LINK_WORDS[needs.link]}")
    return "".join(parts)


def kind_word(needs: Needs, count: int) -> str:
    if needs.mig:
        cards = f" of {model_words(needs)}" if needs.models else ""
        return f"{'slice' if count == 1 else 'slices'} {needs.mig}{cards}"
    if not needs.models:
        return "GPU" if count == 1 else "GPUs"
    return model_words(needs)


def model_words(needs: Needs) -> str:
    return needs.models[0] if len(needs.models) == 1 else f"{', '.join(needs.models[:-1])} or {needs.models[-1]}"


def waiting(needs: Needs, nodes: Sequence[NodeView], pools: Pools) -> str:
    """-> "Waiting for 8 H100. 3 are free on demo-01."."""
    return f"Waiting for {asked(needs)}. {free_now(needs, nodes, pools)}"


def free_now(needs: Needs, nodes: Sequence[NodeView], pools: Pools) -> str:
    node_count, per_node = needs.splits()[0]
    groups = [
        (node, group)
        for node in nodes
        for name in names_in(needs, [node], pools)
        if (group := of_model(needs, name, pools.get(node.name, ())))
    ]
    if not groups:
        return "None is free."
    if node_count > 1:
        return free_nodes(groups, node_count, per_node)
    node, group = max(groups, key=lambda pair: (len(pair[1]), pair[0].name))
    return f"{free_count(needs, node, group, per_node)}."


def free_nodes(groups: list[tuple[NodeView, list[GpuView]]], node_count: int, per_node: int) -> str:
    ready = sorted({node.name for node, group in groups if len(group) >= per_node})
    if not ready:
        return f"No node has {per_node} free."
    verb = "has" if len(ready) == 1 else "have"
    return f"{len(ready)} of {node_count} nodes {verb} {per_node} free: {', '.join(ready)}."


def free_count(needs: Needs, node: NodeView, group: list[GpuView], per_node: int) -> str:
    count = len(group)
    text = f"{count} {'is' if count == 1 else 'are'} free on {node.name}"
    if count >= per_node:
        joined = largest_joined(node, group, needs.link)
        text += f", at most {joined} of them joined by {LINK_WORDS.get(needs.link, needs.link)}"
    return text


def behind(job_id: int, needs: Needs) -> str:
    return f"Behind #{job_id}, which waits for {asked(needs)}."


def node_needed(needs: Needs, nodes: Sequence[NodeView], pools: Pools) -> str:
    """The request fits the machines, but not those that take work now."""
    away = [node for node in nodes if node.unavailable and (needs.gpus == 0 or names_in(needs, [node], pools))]
    if away:
        return f"Waiting for {asked(needs)}. {', '.join(f'{node.name} is {node.unavailable}' for node in away[:3])}."
    if needs.gpus == 0:
        return f"Waiting for {asked(needs)}. No node takes work now."
    return f"Waiting for {asked(needs)}. {unwell(needs, nodes)}"


def unwell(needs: Needs, nodes: Sequence[NodeView]) -> str:
    """-> "GPU 3 of n1 is dirty, GPU 5 of n1 is lost."."""
    named = [f"GPU {gpu.index} of {node.name} is {gpu.trouble}"
             for node in nodes for gpu in node.gpus if gpu.trouble and needs.accepts(gpu)]  # fmt: skip
    if not named:
        return "Some GPUs that it needs are not healthy."
    more = f", and {len(named) - TROUBLES_NAMED} more are not healthy" if len(named) > TROUBLES_NAMED else ""
    return f"{', '.join(named[:TROUBLES_NAMED])}{more}."


def impossible(needs: Needs, nodes: Sequence[NodeView]) -> tuple[str, str]:
    """-> (field, why no machine of this cluster can ever host the request)."""
    every = [gpu for node in nodes for gpu in node.gpus]
    gpus = [gpu for gpu in every if gpu.mig == needs.mig]
    if needs.mig and not gpus:
        profiles = ", ".join(sorted({gpu.mig for gpu in every if gpu.mig}))
        found = f"there are: {profiles}." if profiles else "no GPU is cut into slices."
        return "resources.mig", f"no GPU has a slice {needs.mig}; {found}"
    if every and not gpus:
        return "resources.gpus", f"asks for {asked(needs)}; every GPU is cut into MIG slices, which mig asks for."
    if not gpus:
        return "resources.gpus", f"asks for {asked(needs)}; no node has any GPU yet."
    models = ", ".join(sorted({gpu.model for gpu in gpus}))
    named = [gpu for gpu in gpus if not needs.models or any(matches(wish, gpu.name) for wish in needs.models)]
    if not named:
        what = f"a slice {needs.mig} of GPUs" if needs.mig else "GPUs"
        return "resources.gpu", f"no node has {what} called {model_words(needs)}; there are: {models}."
    fitting = [gpu for gpu in named if needs.accepts(gpu)]
    if not fitting:
        largest = max(gpu.memory_bytes or 0 for gpu in named) / GB
        wanted = (needs.memory_bytes or 0) / GB
        found = f"the largest {kind_word(needs, 1)} has {largest:.1f} GB"
        return "resources.memory", f"asks for {wanted:.4g} GB per GPU; {found}."
    return too_many(needs, nodes)


def too_many(needs: Needs, nodes: Sequence[NodeView]) -> tuple[str, str]:
    pools = {node.name: node.gpus for node in nodes}
    sizes = [
        max((len(of_model(needs, name, node.gpus)) for name in names_in(needs, [node], pools)), default=0)
        for node in nodes
    ]
    largest, (node_count, per_node) = max(sizes), needs.splits()[0]
    able = sum(size >= per_node for size in sizes)
    wanted = f"{per_node} {kind_word(needs, per_node)}"
    if largest < per_node:
        each = "on one node" if node_count == 1 else f"on each of {node_count} nodes"
        found = f"the largest node has {largest} {kind_word(needs, largest)}"
        return "resources.gpus", f"asks for {wanted} {each}; {found}."
    if able < node_count:
        verb = "is" if able == 1 else "are"
        return "resources.nodes", f"asks for {node_count} nodes with {wanted}; there {verb} {able}."
    return "resources.link", f"no node has {wanted} joined by {LINK_WORDS.get(needs.link, needs.link)}."
