"""Words and marks for the hardware on the page of a node."""

from typing import Any

from django import template
from django.utils.translation import gettext as _

from portal.hardware.mig import text_of
from portal.models import HardwareOrder
from portal.templatetags.gy import STATES

register = template.Library()

SEVERITIES = {
    "info": ("k-wait", "info-circle"),
    "warning": ("k-dirty", "alert-triangle"),
    "critical": ("k-quar", "alert-octagon"),
}
ORDER_STATES = {
    "sent": "starting",
    "done": "succeeded",
    "undone": "failed",
    "cancelled": "stopped",
}


@register.filter
def state_kind(state: str) -> str:
    """The colour class of a state."""
    return STATES.get(state, ("k-unknown", "", ""))[0]


@register.filter
def severity_kind(severity: str) -> str:
    return SEVERITIES.get(severity, SEVERITIES["warning"])[0]


@register.filter
def severity_icon(severity: str) -> str:
    return SEVERITIES.get(severity, SEVERITIES["warning"])[1]


@register.filter
def order_words(order: HardwareOrder) -> str:
    """What a node was told to do."""
    which = f"GPU {order.gpu.index}: " if order.gpu else ""
    if order.kind == "mig":
        return which + layout_words(order.order)
    if order.kind == "release":
        return _("Let go of the GPU driver for %(n)d s") % {"n": order.order.get("duration_s") or 0}
    if order.kind == "stop_foreign":
        return which + _("end foreign process %(pid)s") % {"pid": order.order.get("pid")}
    return which + order.kind


@register.filter
def order_state(order_state: str) -> str:
    """The badge that fits: orders live like jobs."""
    return ORDER_STATES.get(order_state, order_state)


def layout_words(order: dict[str, Any]) -> str:
    names = [str(one.get("profile")) for one in order.get("layout") or []]
    return _("cut into %(layout)s") % {"layout": text_of(names)} if names else _("switch MIG off")


@register.filter
def block_kind(state: str) -> str:
    """The colour of a slice in the drawing of a card: what stays is calm, what is new is one's own doing."""
    return {"kept": "k-free", "created": "k-mine", "": "k-busy"}.get(state) or state_kind(state)
