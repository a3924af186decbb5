"""The page of a new job: a form, its YAML and its command, and whether it would start now."""

import uuid
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST

from portal.models import Project, User
from portal.services import access, foresight, specs
from portal.services import jobs as job_service
from portal.services.errors import Problem
from portal.services.job_lists import whole_number
from portal.web import forms
from portal.web.pages import page
from portal.web.people import person


@require_http_methods(["GET", "POST"])
@page
def new_job(request: HttpRequest) -> HttpResponse:
    if request.method == "GET":
        draft, origin = first_draft(request)
        return form_page(request, draft, origin=origin)
    data: object = None
    try:
        data = forms.spec_data(request.POST)
        key = request.POST.get("key", "")[:80]
        submitted = job_service.submit(specs.parse(data), actor=person(request), idempotency_key=key or None)
    except Problem as problem:
        return form_page(request, data, problem=problem)
    return redirect("job", job_id=submitted.job.pk)


@require_POST
@page
def check_job(request: HttpRequest) -> JsonResponse:
    """Answers every edit: the other side of the same object, what is wrong with it, and whether it would start."""
    data: object = None
    try:
        data = forms.spec_data(request.POST)
        spec = specs.parse(data)
        prospect = foresight.would_start(spec)
    except Problem as problem:
        return JsonResponse(wrong(request, data, problem))
    return JsonResponse({
        "yaml": specs.to_yaml(spec), "form": forms.form_values(spec.stored()), "errors": {},
        "commands": forms.commands(spec), "start": start_panel(request, prospect), "ready": not prospect.never,
    })


# --- helpers ----------------------------------------------------------------------------------------------------------


def first_draft(request: HttpRequest) -> tuple[dict[str, Any], Any]:
    """What the form begins with: a job to copy, the example, or next to nothing."""
    source = whole_number(request.GET.get("from", ""))
    if source is not None:
        copied = access.get_job(person(request), source)
        return dict(copied.spec), copied
    return forms.example_data(request.GET.get("example", "")) or {}, None


def form_page(
    request: HttpRequest, data: object, *, origin: Any = None, problem: Problem | None = None
) -> HttpResponse:
    posted = request.POST if request.method == "POST" else {}
    models = foresight.free_by_model()
    errors = forms.field_errors(problem) if problem else {}
    context = {
        "values": forms.form_values(data), "yaml": posted.get("yaml") or (forms.dumped(data) if data else ""),
        "edited": posted.get("edited", "form"), "key": posted.get("key") or uuid.uuid4().hex,
        "errors": {**errors, "general": errors.get("", [])}, "problem": problem, "origin": origin,
        "models": models, "model_names": [model.name for model in models], "projects": projects_of(person(request)),
        "example": forms.example_data("ddp") is not None, "links": links(), "launchers": ("script", "torchrun"),
    }
    return render(request, "jobs/new.html", context, status=problem.status if problem else 200)


def links() -> list[tuple[str, str]]:
    return [("any", _("Any")), ("pcie-switch", _("PCIe switch")), ("nvlink", _("NVLink"))]


def projects_of(user: User) -> Any:
    """Those that one may submit to: the own one and those one is a member of."""
    return Project.objects.filter(memberships__user=user).distinct()


def wrong(request: HttpRequest, data: object, problem: Problem) -> dict[str, Any]:
    """The other side follows as far as it can be read; the panel says what to mend first."""
    edited_form = request.POST.get("edited") != "yaml"
    return {
        "yaml": forms.dumped(data) if edited_form and data is not None else None,
        "form": None if edited_form or data is None else forms.form_values(data),
        "errors": forms.field_errors(problem), "commands": None, "ready": False,
        "start": start_panel(request, None),
    }


def start_panel(request: HttpRequest, prospect: foresight.Prospect | None) -> str:
    return render_to_string("jobs/_start.html", {"prospect": prospect}, request)
