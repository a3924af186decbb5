"""A GPU as a cell of the grid, and as a line that the browser can draw a hover card from."""

from django import template
from django.urls import reverse
from django.utils.html import format_html, format_html_join, json_script
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from portal.services.cells import Cell
from portal.templatetags.gy import CELL_MARKS, cell_class, gb, percent, share_of, short_uuid, state_word, watts

register = template.Library()

CELL_STATES = ("free", "busy", "mine", "dirty", "suspect", "quarantined", "lost", "unreachable", "draining", "mig")
SLICE_CLASSES = {
    "free": "f", "mine": "m", "busy": "", "dirty": "d", "suspect": "s", "quarantined": "q", "draining": "h",
}  # fmt: skip
CUT_STATES = {"mig", "draining", "busy", "mine", "dirty", "suspect"}  # of a card whose slices are drawn
SHOWS_NUMBERS = {"busy", "mine"}
FIELDS = ("utilization_percent", "memory_used_bytes", "power_mw", "temperature_c")


@register.simple_tag
def gpu_cell(cell: Cell) -> SafeString:
    """A link to the GPU. `static/js/grid.js` moves it: --u, --m, the digits. A cut card shows its slices instead."""
    if cell.split and cell.state in CUT_STATES:
        return cut_cell(cell)
    return format_html(
        '<a class="gc {}{}" id="c-{}" href="{}#gpu-{}" tabindex="-1" style="--u:{};--m:{}" aria-label="{}"{}>{}</a>',
        cell_class(cell.state),
        hatched(cell),
        cell.gpu.uuid,
        reverse("node", args=[cell.node.name]),
        cell.gpu.index,
        round(cell.utilization_percent or 0),
        round(cell.memory_percent or 0),
        spoken(cell),
        facts(cell),
        digits(cell),
    )


def cut_cell(cell: Cell) -> SafeString:
    return format_html(
        '<a class="gc mig" id="c-{}" href="{}#{}" tabindex="-1" aria-label="{}"{}>{}{}</a>',
        cell.gpu.uuid,
        reverse("node", args=[cell.node.name]),
        cell.anchor,
        ", ".join([f"{cell.node.name} GPU {cell.gpu.index}", state_word("mig"), *map(spoken_slice, cell.slices)]),
        facts(cell),
        mig_strip(cell),
        format_html('<span class="mk"><i class="ti ti-{}" aria-hidden="true"></i></span>', CELL_MARKS[cell.state])
        if cell.state in CELL_MARKS
        else "",
    )


@register.simple_tag
def mig_strip(cell: Cell) -> SafeString:
    """The slices of a card side by side, as wide as their share of its compute; the rest is hatched."""
    drawn = [(SLICE_CLASSES.get(one.state, "x"), one.compute) for one in cell.slices]
    if cell.unused:
        drawn.append(("u", cell.unused))
    return format_html_join("", '<span class="{}" style="--w:{}"></span>', drawn)


def spoken_slice(one: Cell) -> str:
    """1g.10gb busy (charlie)"""
    holder = f" ({one.holder.owner})" if one.holder else ""
    return f"{one.gpu.mig_profile} {state_word(one.state).lower()}{holder}"


@register.simple_tag
def grid_words() -> SafeString:
    """What the hover card of static/js/grid.js says, for its script to find."""
    words: dict[str, object] = {
        "job": _("Job"),
        "owner": _("Owner"),
        "use": _("Utilisation"),
        "memory": _("Memory"),
        "power": _("Power"),
        "held": _("Held for"),
        "why": _("Note"),
        "slices": _("Slices"),
        "states": {state: state_word(state) for state in CELL_STATES},
    }
    return json_script(words, "grid-words")


def hatched(cell: Cell) -> str:
    """What is not known is hatched, not empty."""
    if cell.state not in SHOWS_NUMBERS:
        return ""
    use = " na-u" if cell.utilization_percent is None else ""
    return use + (" na-m" if cell.memory_percent is None else "")


def digits(cell: Cell) -> SafeString:
    icon = CELL_MARKS.get(cell.state)
    if icon:
        return format_html('<span class="mk"><i class="ti ti-{}" aria-hidden="true"></i></span>', icon)
    if cell.state not in SHOWS_NUMBERS or cell.utilization_percent is None:
        return format_html("<b>{}</b>", "")
    return format_html("<b>{}</b>", round(cell.utilization_percent))


def spoken(cell: Cell) -> str:
    """h100-03 GPU 5, Mine, 94%"""
    words = [f"{cell.node.name} GPU {cell.gpu.index}", state_word(cell.state)]
    if cell.state in SHOWS_NUMBERS and cell.utilization_percent is not None:
        words.append(f"{cell.utilization_percent:.0f}%")
    return ", ".join(words)


def facts(cell: Cell) -> SafeString:
    """data- attributes: everything the hover card says. Unknown ones are absent."""
    holder = cell.holder
    known: dict[str, object] = {
        "state": cell.state,
        "title": f"{cell.node.name} · GPU {cell.gpu.index}",
        "uuid": short_uuid(cell.gpu.uuid),
        "total": cell.gpu.memory_total_bytes,
        "limit": cell.gpu.power_limit_mw,
        "why": cell.gpu.state_reason or cell.gpu.draining or None,
        "slices": "; ".join(map(spoken_slice, cell.slices)) or None,
        "model": cell.gpu.name,
        **{name.split("_")[0]: cell.latest.get(name) for name in FIELDS},
    }
    if holder is not None:
        job = f"{holder.job_name} #{holder.job_id}" if holder.job_id else ""
        known |= {
            "owner": holder.owner,
            "initials": holder.initials,
            "job": job or None,
            "jobid": holder.job_id,
            "rank": holder.rank,
            "since": holder.since.isoformat(),
        }
    return format_html_join("", ' data-{}="{}"', ((name, value) for name, value in known.items() if value is not None))


@register.simple_tag
def gpu_meters(cell: Cell) -> SafeString:
    """The four lines of a GPU's card."""
    gpu = cell.gpu
    memory = f"{gb(cell.memory_used_bytes)} / {gb(gpu.memory_total_bytes)} GB"
    power = f"{watts(cell.power_mw)} / {watts(gpu.power_limit_mw)} W"
    rows = (
        (_("Use"), "utilization_percent", 100.0, percent(cell.utilization_percent)),
        (_("Memory"), "memory_used_bytes", gpu.memory_total_bytes, memory),
        (_("Power"), "power_mw", gpu.power_limit_mw, power),
        (_("Temp"), "temperature_c", 100.0, f"{cell.temperature_c or 0:.0f} °C"),
    )
    return format_html_join("", "{}", ((meter(cell, *row),) for row in rows))


def meter(cell: Cell, label: str, name: str, whole: float | None, text: str) -> SafeString:
    """Label, bar, value. Hatched with its reason when it is not known; filled nothing when the whole is not."""
    value = cell.latest.get(name)
    tone = " mine" if cell.state == "mine" else ""
    bar = '<span class="bar{}" style="--v:{}"><i></i></span>'
    row = f'<div class="mrow" data-meter="{{}}"><span>{{}}</span>{bar}<span>{{}}</span></div>'
    if value is None:
        shown = format_html('<span class="na" title="{}">{}</span>', cell.why_missing(name), _("n/a"))
        return format_html(row, name, label, " unknown", 0, shown)
    return format_html(row, name, label, tone, share_of(value, whole), text)
