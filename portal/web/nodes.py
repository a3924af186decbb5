"""The machines: a list, and a page for each with its GPUs, links, processes and events."""

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from portal.services import access, node_details
from portal.services.errors import Problem
from portal.services.node_details import NodeDetail
from portal.services.overview import cluster
from portal.web.pages import page
from portal.web.people import person

CHARTED = ("utilization_percent", "memory_used_bytes", "power_mw")


@require_safe
@never_cache
@page
def node_list(request: HttpRequest) -> HttpResponse:
    view = cluster(person(request))
    template = "nodes/list_live.html" if request.GET.get("part") == "live" else "nodes/list.html"
    return render(request, template, {"view": view})


@require_safe
@never_cache
@page
def node_page(request: HttpRequest, name: str) -> HttpResponse:
    found = access.get_node(person(request), name)
    detail = node_details.detail(person(request), found)
    if request.GET.get("part") == "live":
        return render(request, "nodes/live.html", {"detail": detail, "node": found})
    if request.GET.get("part") == "charts":
        return JsonResponse(charts(detail, window(request.GET.get("window", ""))))
    return render(request, "nodes/node.html", {"detail": detail, "node": found, "charts": charts(detail)})


def window(asked: str) -> int:
    known = {str(seconds): seconds for seconds in node_details.WINDOWS_S}
    if asked not in known:
        raise Problem(400, "bad_window", f"window: one of {', '.join(known)} seconds.")
    return known[asked]


def charts(detail: NodeDetail, window_s: int = node_details.WINDOWS_S[0]) -> dict[str, object]:
    """For static/js/charts.js."""
    series = node_details.recent(detail.cells, window_s)
    gpus = [
        {
            "uuid": cell.gpu.uuid,
            "label": f"GPU {cell.gpu.index}",
            "color": cell.gpu.index % 8 + 1,
            "memory_total_bytes": cell.gpu.memory_total_bytes,
            "power_limit_mw": cell.gpu.power_limit_mw,
        }
        for cell in detail.cells
    ]
    columns = {gpu.uuid: {name: gpu.mean[name] for name in CHARTED} for gpu in series.gpus}
    return {"gpus": gpus, "at": series.at, "series": columns}
