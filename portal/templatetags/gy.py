"""How values read on a page. Unknown is n/a with its reason, never 0; a state is a colour, a mark and a word."""

from datetime import datetime
from typing import Any

from django import template
from django.template.defaultfilters import date as date_filter
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

register = template.Library()

DAY_S = 86_400
CARD_SIZES = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 144, 180, 192, 256, 288)
STATES: dict[str, tuple[str, str, Any]] = {
    # jobs and attempts
    "waiting": ("k-wait", "hourglass", gettext_lazy("Waiting")),
    "pending": ("k-wait", "hourglass", gettext_lazy("Pending")),
    "starting": ("k-run", "loader-2", gettext_lazy("Starting")),
    "running": ("k-run", "player-play", gettext_lazy("Running")),
    "stopping": ("k-wait", "player-stop", gettext_lazy("Stopping")),
    "succeeded": ("k-ok", "circle-check", gettext_lazy("Succeeded")),
    "failed": ("k-fail", "circle-x", gettext_lazy("Failed")),
    "stopped": ("k-wait", "square", gettext_lazy("Stopped")),
    # GPUs
    "free": ("k-free", "circle", gettext_lazy("Free")),
    "busy": ("k-busy", "square", gettext_lazy("Busy")),
    "mine": ("k-mine", "user", gettext_lazy("Mine")),
    "dirty": ("k-dirty", "ghost-2", gettext_lazy("Foreign process")),
    "suspect": ("k-suspect", "question-mark", gettext_lazy("Suspect")),
    "quarantined": ("k-quar", "x", gettext_lazy("Quarantined")),
    "lost": ("k-lost", "plug-connected-x", gettext_lazy("Lost")),
    "draining": ("k-lost", "arrow-bar-to-down", gettext_lazy("Draining")),
    "mig": ("k-busy", "layout-columns", gettext_lazy("MIG")),
    # nodes
    "joining": ("k-wait", "hourglass", gettext_lazy("Joining")),
    "ready": ("k-ok", "circle-check", gettext_lazy("Ready")),
    "silent": ("k-suspect", "question-mark", gettext_lazy("Silent")),
    "unreachable": ("k-lost", "plug-connected-x", gettext_lazy("Unreachable")),
}
CELL_CLASSES = {"quarantined": "quar", "unreachable": "lost", "draining": "hold"}
CELL_MARKS = {
    "dirty": "ghost-2",
    "suspect": "question-mark",
    "quarantined": "x",
    "unreachable": "minus",
    "lost": "minus",
    "draining": "arrow-bar-to-down",
}


@register.simple_tag
def badge(state: str, word: str = "", large: bool = False, plain: bool = False) -> SafeString:
    kind, icon, own_word = STATES.get(state, ("k-unknown", "help-circle", state))
    extra = (" lg" if large else "") + (" plain" if plain else "")
    mark = '<span class="st {}{}"><i class="ti ti-{}" aria-hidden="true"></i>{}</span>'
    return format_html(mark, kind, extra, icon, word or own_word)


@register.simple_tag
def counted_badge(state: str, count: int) -> SafeString:
    """«2 GPUs quarantined», for the head of a page."""
    if state == "dirty":
        return badge(state, ngettext("%(n)d foreign process", "%(n)d foreign processes", count) % {"n": count})
    what = ngettext("%(n)d GPU", "%(n)d GPUs", count) % {"n": count}
    return badge(state, f"{what} {state_word(state).lower()}")


@register.filter
def state_word(state: str) -> str:
    return str(STATES.get(state, ("", "", state))[2])


@register.filter
def cell_class(state: str) -> str:
    return CELL_CLASSES.get(state, state)


@register.filter
def cell_mark(state: str) -> str:
    return CELL_MARKS.get(state, "")


@register.filter
def times(count: int) -> range:
    """For drawing something so many times."""
    return range(min(int(count), 16))


@register.filter
def wants(job: Any) -> str:
    """16× H100 · nvlink"""
    asked = job.spec.get("resources", {})
    models, link = asked.get("gpu") or [], asked.get("link")
    named = " or ".join([models] if isinstance(models, str) else models) or "GPU"
    return f"{job.gpu_count}× {named}" + (f" · {link}" if link and link != "any" else "")


@register.simple_tag
def na(reason: str = "") -> SafeString:
    """Unknown, with why: {% na "no reading yet" %}."""
    return format_html('<span class="na" title="{}">{}</span>', reason or _("not known"), _("n/a"))


@register.filter
def gb(value: float | None, digits: int = 1) -> str:
    """Bytes as decimal GB without the unit: 61.4."""
    return _("n/a") if value is None else f"{value / 1e9:,.{digits}f}"


@register.filter
def size(value: float | None) -> str:
    """Bytes with the unit that fits: 940 B, 12.4 kB, 3.1 MB."""
    if value is None:
        return _("n/a")
    amount, units = float(value), ["B", "kB", "MB", "GB", "TB"]
    while abs(amount) >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


@register.filter
def card_size(memory_bytes: float) -> str:
    """As the card is sold: what the driver reports lies between that number of GiB and of GB."""
    low, high = memory_bytes / 2**30 * 0.99, memory_bytes / 1e9 * 1.01
    sold = next((gigabytes for gigabytes in CARD_SIZES if low <= gigabytes <= high), None)
    return str(sold) if sold else f"{memory_bytes / 1e9:.0f}"


@register.filter
def watts(value_mw: float | None) -> str:
    return _("n/a") if value_mw is None else f"{value_mw / 1000:.0f}"


@register.filter
def percent(value: float | None) -> str:
    return _("n/a") if value is None else f"{value:.0f}%"


@register.filter
def share_of(value: float | None, whole: float | None) -> str:
    """Percent of a whole for a bar's length, 0 when either is unknown (the bar is hatched then)."""
    if value is None or not whole:
        return "0"
    return f"{min(100.0, max(0.0, value / whole * 100)):.1f}"


@register.filter
def duration(seconds: float | None) -> str:
    """97 -> 1 m 37 s, 5820 -> 1 h 37 m. The same words as static/js/format.js."""
    if seconds is None:
        return _("n/a")
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < DAY_S:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // DAY_S} d {whole % DAY_S // 3600} h"


@register.filter
def until(start: datetime | None, end: datetime | None) -> str:
    """How long from one moment to another; to now if there is no end."""
    return _("n/a") if start is None else duration(((end or timezone.now()) - start).total_seconds())


@register.filter
def since(moment: datetime | None) -> str:
    """Roughly, for a sentence: 40 s, 6 min, 3 h."""
    if moment is None:
        return _("n/a")
    seconds = max(0, int((timezone.now() - moment).total_seconds()))
    if seconds < 100:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


@register.simple_tag
def elapsed(start: datetime | None) -> SafeString | str:
    """Counts up in the browser."""
    if start is None:
        return na(_("not started"))
    return format_html(
        '<time datetime="{}" data-elapsed="{}" title="{}">{}</time>',
        start.isoformat(),
        start.isoformat(),
        absolute(start),
        until(start, None),
    )


@register.simple_tag
def ago(moment: datetime | None) -> SafeString | str:
    """Relative up to a day, then the date; the absolute time with its zone is in the title."""
    if moment is None:
        return na(_("never"))
    seconds = (timezone.now() - moment).total_seconds()
    return format_html(
        '<time datetime="{}" data-ago="{}" title="{}">{}</time>',
        moment.isoformat(),
        moment.isoformat(),
        absolute(moment),
        spoken_ago(seconds, moment),
    )


@register.filter
def absolute(moment: datetime) -> str:
    return date_filter(timezone.localtime(moment), "j M Y H:i:s T")


@register.filter
def short_uuid(uuid: str) -> str:
    """GPU-7d1c…40e2"""
    return uuid if len(uuid) <= 14 else f"{uuid[:8]}…{uuid[-4:]}"


@register.filter
def short_bus(bus_id: str) -> str:
    """00000000:1B:00.0 -> 1b:00.0; a UUID is cut in its middle."""
    return short_uuid(bus_id) if bus_id.startswith("GPU-") else bus_id.lower().partition(":")[2] or bus_id


@register.filter
def series(index: int) -> int:
    """Colours of charts go round: 1 to 8."""
    return index % 8 + 1


def spoken_ago(seconds: float, moment: datetime) -> str:
    if seconds < 60:
        return _("%(n)d s ago") % {"n": max(0, int(seconds))}
    if seconds < 3600:
        return _("%(n)d min ago") % {"n": int(seconds // 60)}
    if seconds < DAY_S:
        return _("%(n)d h ago") % {"n": int(seconds // 3600)}
    return date_filter(timezone.localtime(moment), "j M")
