"""What administrators do to the hardware from the page of a node, and the plan that everyone may make."""

from collections.abc import Callable
from http import HTTPStatus
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from portal.models import Gpu, Node
from portal.services import access, health, mig, mig_drafts, node_details, nodes, orders
from portal.services.errors import Problem
from portal.services.mig_cards import MigCard
from portal.web.pages import page
from portal.web.people import person

RELEASE_S = 60.0


@require_POST
@page
def cordon(request: HttpRequest, name: str) -> HttpResponse:
    node = managed_node(request, name)
    reason = request.POST.get("reason", "")
    return done(request, node, lambda: nodes.set_schedulable(node, False, reason=reason, actor=person(request)),
                _("%(node)s gets no new jobs."))  # fmt: skip


@require_POST
@page
def uncordon(request: HttpRequest, name: str) -> HttpResponse:
    node = managed_node(request, name)
    return done(request, node, lambda: nodes.set_schedulable(node, True, actor=person(request)),
                _("%(node)s is offered again."))  # fmt: skip


@require_POST
@page
def release_driver(request: HttpRequest, name: str) -> HttpResponse:
    node = managed_node(request, name)
    return done(request, node, lambda: orders.release_driver(node, RELEASE_S, actor=person(request)),
                _("%(node)s is told to let go of its GPU driver."))  # fmt: skip


@require_POST
@page
def release(request: HttpRequest, uuid: str) -> HttpResponse:
    gpu = managed_gpu(request, uuid)
    return done(request, gpu.node, lambda: health.release(gpu, actor=person(request)),
                _("GPU %(gpu)s is released."), gpu)  # fmt: skip


@require_POST
@page
def quarantine(request: HttpRequest, uuid: str) -> HttpResponse:
    gpu = managed_gpu(request, uuid)
    reason = request.POST.get("reason", "")
    return done(request, gpu.node, lambda: health.quarantine(gpu, reason, actor=person(request)),
                _("GPU %(gpu)s is quarantined."), gpu)  # fmt: skip


@require_POST
@page
def end_process(request: HttpRequest, uuid: str) -> HttpResponse:
    gpu = managed_gpu(request, uuid)
    pid = request.POST.get("pid", "")
    return done(request, gpu.node, lambda: node_details.end_foreign(gpu, pid, actor=person(request)),
                _("The node is told to end the process on GPU %(gpu)s."), gpu)  # fmt: skip


@require_safe
@never_cache
@page
def mig_plan(request: HttpRequest, name: str) -> HttpResponse:
    card = card_of(request, access.get_node(person(request), name), request.GET.get("gpu", ""))
    draft = mig_drafts.draft(card, request.GET.get("wanted", ""), person(request))
    return render(request, "nodes/mig_plan.html", {"draft": draft, "may_manage": person(request).is_superuser})


@require_POST
@page
def mig_apply(request: HttpRequest, name: str) -> HttpResponse:
    node = managed_node(request, name)
    gpu = card_of(request, node, request.POST.get("gpu", "")).cell.gpu
    wanted = request.POST.get("wanted", "")
    return done(request, node, lambda: mig.apply(gpu, wanted, actor=person(request)),
                _("The change of GPU %(gpu)s is under way."), gpu)  # fmt: skip


@require_POST
@page
def order_cancel(request: HttpRequest, order_id: UUID) -> HttpResponse:
    order = access.get_order(person(request), order_id)
    access.require_admin(person(request))
    return done(request, order.node, lambda: orders.cancel(order, actor=person(request)), _("The change is cancelled."))


# --- helpers ----------------------------------------------------------------------------------------------------------


def managed_node(request: HttpRequest, name: str) -> Node:
    node = access.get_node(person(request), name)
    access.require_admin(person(request))
    return node


def managed_gpu(request: HttpRequest, uuid: str) -> Gpu:
    gpu = access.get_gpu(person(request), uuid)
    access.require_admin(person(request))
    return gpu


def card_of(request: HttpRequest, node: Node, uuid: str) -> MigCard:
    found = node_details.detail(person(request), node).mig
    card = next((one for one in found if one.cell.gpu.uuid == uuid), None)
    if card is None:
        raise Problem(404, "not_found", f"{node.name} has no GPU of this UUID that can be cut into MIG slices.")
    return card


def done(
    request: HttpRequest, node: Node, act: Callable[[], object], said: str, gpu: Gpu | None = None
) -> HttpResponse:
    """Do it, say so on the page of the node; a refusal is said there too."""
    try:
        act()
    except Problem as problem:
        if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        messages.error(request, problem.detail)
    else:
        messages.success(request, said % {"node": node.name, "gpu": gpu.index if gpu else ""})
    return redirect("node", name=node.name)
