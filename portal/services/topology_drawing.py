"""The machine as a drawing: memory domains, PCIe switches with their network cards, GPUs, and what joins them below.

Only what was reported is drawn: a GPU whose place in the PCI tree is not known hangs on its memory domain directly.
"""

from dataclasses import dataclass, field
from itertools import combinations

from portal.models import Node
from portal.services.cells import Cell
from portal.services.link_matrix import tone_of

COLUMN = 62
BOX = 52
EDGE = 6
NEAR = {"PIX", "PXB"}
BAR_FROM = 3  # so many GPUs, each joined to each other, are drawn on one bar
ARCS_LABELLED = 4  # more of them would write over each other


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    width: int
    height: int
    text: str
    sub: str = ""
    kind: str = ""  # the CSS class

    @property
    def middle(self) -> int:
        return self.x + self.width // 2

    @property
    def text_y(self) -> int:
        return self.y + self.height // 2 + (-2 if self.sub else 4)

    @property
    def sub_y(self) -> int:
        return self.y + self.height // 2 + 12


@dataclass(frozen=True)
class Line:
    path: str
    kind: str = ""
    label: str = ""
    x: int = 0
    y: int = 0


@dataclass
class Drawing:
    width: int
    height: int = 0
    words: str = ""
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """GPUs behind one PCIe switch, with the network cards there. Alone and without a card: no switch is known."""

    cells: list[Cell]
    nics: list[str]

    @property
    def switched(self) -> bool:
        return len(self.cells) > 1 or bool(self.nics)


def drawing(node: Node, cells: list[Cell]) -> Drawing | None:
    """None if there is nothing to see: one GPU, or nothing known of how they are joined."""
    if len(cells) < 2 or not node.links:
        return None
    domains = by_domain(node, cells)
    made = Drawing(width=COLUMN * len(cells) + 2 * EDGE)
    switched = any(group.switched for _, groups in domains for group in groups)
    places = draw_tree(made, domains, 158 if any(group.nics for _, found in domains for group in found)
                       else 126 if switched else 84)  # fmt: skip
    draw_links(made, node, cells, places)
    made.words = in_words(node, domains, len(cells))
    return made


# --- who hangs where --------------------------------------------------------------------------------------------------


def by_domain(node: Node, cells: list[Cell]) -> list[tuple[str, list[Group]]]:
    domains: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda one: (one.gpu.numa_node is None, one.gpu.numa_node or 0, one.gpu.index)):
        name = "PCIe" if cell.gpu.numa_node is None else f"NUMA {cell.gpu.numa_node}"
        domains.setdefault(name, []).append(cell)
    return [(name, groups(node, found)) for name, found in domains.items()]


def groups(node: Node, cells: list[Cell]) -> list[Group]:
    """Joined by a near link to each other or to the same network card."""
    near = [{a, b} for a, b, kind in node.links if kind in NEAR]
    near += [nic_neighbours(nic) for nic in node.nics]
    found: list[set[str]] = []
    for uuid in (cell.gpu.uuid for cell in cells):
        mine = {uuid}.union(*(one for one in near if uuid in one))
        touching = [one for one in found if one & mine]
        found = [one for one in found if not one & mine] + [mine.union(*touching)]
    places = [[cell for cell in cells if cell.gpu.uuid in one] for one in found]
    return [Group(own, nics_at(node, own)) for own in sorted(places, key=lambda own: cells.index(own[0]))]


def nic_neighbours(nic: dict[str, dict[str, str]]) -> set[str]:
    return {uuid for uuid, kind in (nic.get("distances") or {}).items() if kind == "PIX"}


def nics_at(node: Node, cells: list[Cell]) -> list[str]:
    own = {cell.gpu.uuid for cell in cells}
    return [str(nic.get("name")) for nic in node.nics if nic_neighbours(nic) & own]


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw_tree(made: Drawing, domains: list[tuple[str, list[Group]]], gpu_y: int) -> dict[str, Box]:
    """-> where each GPU came to stand."""
    places: dict[str, Box] = {}
    column = 0
    for name, found in domains:
        size = sum(len(group.cells) for group in found)
        width = min(size * COLUMN - 10, 150)
        top = Box(EDGE + column * COLUMN + (size * COLUMN - width) // 2, 6, width, 32, name)
        made.boxes.append(top)
        for group in found:
            places |= draw_group(made, group, column, gpu_y, top)
            column += len(group.cells)
    made.height = gpu_y + 46
    return places


def draw_group(made: Drawing, group: Group, column: int, gpu_y: int, top: Box) -> dict[str, Box]:
    above = top
    if group.switched:
        above = Box(EDGE + column * COLUMN + 5, 66, len(group.cells) * COLUMN - 10, 26,
                    "PCIe switch" if len(group.cells) > 1 else "switch")  # fmt: skip
        made.boxes.append(above)
        made.lines.append(Line(f"M{top.middle} {top.y + top.height}L{above.middle} {above.y}"))
    if group.nics:
        label = group.nics[0] if len(group.nics) == 1 else f"{len(group.nics)} NICs"
        made.boxes.append(Box(above.middle - 30, 104, 60, 22, label[:8], kind="nic"))
        made.lines.append(Line(f"M{above.middle} {above.y + above.height}V104"))
    places = {}
    for number, cell in enumerate(group.cells):
        x = EDGE + (column + number) * COLUMN + (COLUMN - BOX) // 2
        box = Box(x, gpu_y, BOX, 40, f"G{cell.gpu.index}", said(cell), cell.state)
        start = f"{box.middle} {above.y + above.height}" if group.switched else f"{top.middle} {top.y + top.height}"
        made.lines.append(Line(f"M{start}L{box.middle} {gpu_y}"))
        made.boxes.append(box)
        places[cell.gpu.uuid] = box
    return places


def draw_links(made: Drawing, node: Node, cells: list[Cell], places: dict[str, Box]) -> None:
    fast = [(a, b, str(kind)) for a, b, kind in node.links if tone_of(kind) == 1 and a in places and b in places]
    pairs = len(list(combinations(places, 2)))
    if fast and (node.nvswitch or (len(cells) >= BAR_FROM and len(fast) == pairs)):
        draw_bar(made, node, cells, places, fast[0][2])
    else:
        draw_arcs(made, places, fast)


def draw_bar(made: Drawing, node: Node, cells: list[Cell], places: dict[str, Box], kind: str) -> None:
    y = made.height + 44
    for cell in cells:
        box, links = places[cell.gpu.uuid], cell.gpu.hardware.get("links") or []
        up = sum(one.get("active") is True for one in links)
        tone = "off" if cell.split else "down" if links and up < len(links) else "fast"
        label = "MIG" if cell.split else f"{up} of {len(links)}" if tone == "down" else ""
        made.lines.append(Line(f"M{box.middle} {box.y + box.height}V{y}", tone, label, box.middle + 5, y - 18))
    words = f"NVSwitch, {kind}" if node.nvswitch else f"{kind} between every pair"
    made.boxes.append(Box(EDGE, y, made.width - 2 * EDGE, 28, words, kind="fast"))
    made.height = y + 34


def draw_arcs(made: Drawing, places: dict[str, Box], fast: list[tuple[str, str, str]]) -> None:
    """Each pair that is joined fast, as an arc below it."""
    deepest = 0
    labelled = len(fast) <= ARCS_LABELLED
    for a, b, kind in fast:
        left, right = sorted((places[a], places[b]), key=lambda box: box.x)
        depth = 12 + (right.x - left.x) // 5
        deepest = max(deepest, depth)
        y, middle = left.y + left.height, (left.middle + right.middle) // 2
        path = f"M{left.middle} {y}Q{middle} {y + 2 * depth} {right.middle} {y}"
        made.lines.append(Line(path, "fast", kind if labelled else "", middle, y + depth + 12))
    made.height += deepest + 16 if fast else 0


def said(cell: Cell) -> str:
    if cell.state in ("busy", "mine") and cell.utilization_percent is not None:
        return f"{cell.utilization_percent:.0f}%"
    return {"mig": "MIG", "quarantined": "fenced", "unreachable": "away"}.get(cell.state, cell.state)


def in_words(node: Node, domains: list[tuple[str, list[Group]]], gpus: int) -> str:
    switches = sum(group.switched for _, found in domains for group in found)
    parts = [f"{gpus} GPUs on {', '.join(name for name, _ in domains)}"]
    parts += [f"{switches} PCIe switches"] if switches else []
    parts += ["all joined by NVSwitch"] if node.nvswitch else []
    return "; ".join(parts)
