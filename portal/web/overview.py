"""The first page: what is free, what is mine, what waits, what broke."""

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from portal.services.overview import ClusterView, ModelGroup, cluster, history
from portal.web.pages import page
from portal.web.people import person

LEGEND = ("free", "busy", "mine", "dirty", "suspect", "quarantined", "lost", "unreachable", "draining", "mig")
ALWAYS = {"free", "busy", "mine"}


@require_safe
@never_cache
@page
def overview(request: HttpRequest) -> HttpResponse:
    if request.GET.get("part") == "history":
        return JsonResponse({str(job): values for job, values in history(person(request)).items()})
    view = cluster(person(request))
    template = "overview/live.html" if request.GET.get("part") == "live" else "overview.html"
    return render(request, template, {"view": view, "columns": columns(view.groups), "legend": legend(view)})


def columns(groups: list[ModelGroup]) -> list[list[ModelGroup]]:
    """Two columns of about the same height; one if there is one model."""
    left: list[ModelGroup] = []
    right: list[ModelGroup] = []
    for group in groups:
        shorter = left if height(left) <= height(right) else right
        shorter.append(group)
    return [column for column in (left, right) if column]


def height(column: list[ModelGroup]) -> float:
    return sum(1.4 + sum(len(row.lines) for row in group.rows) for group in column)


def legend(view: ClusterView) -> list[tuple[str, int]]:
    counts = view.counts
    return [(state, counts.get(state, 0)) for state in LEGEND if state in ALWAYS or counts.get(state)]
