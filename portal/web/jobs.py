"""The pages of jobs: the list, one job, its log, its stop."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from portal.models import Job, LogStream, Project
from portal.services import access, job_details, logs, samples
from portal.services import jobs as job_service
from portal.services.errors import Problem
from portal.services.job_lists import JobFilter, listing
from portal.web.pages import page
from portal.web.people import person

PULL_BYTES = 64 * 1024  # of one stream in one answer
PULL_STREAMS = 512
CHARTED = ("utilization_percent", "memory_used_bytes", "power_mw")


@require_GET
@page
def jobs(request: HttpRequest) -> HttpResponse:
    wanted = JobFilter.of(request.GET)
    context = {"list": listing(person(request), wanted), "wanted": wanted, "states": states()}
    if request.GET.get("part") == "rows":
        return render(request, "jobs/_rows.html", context)
    projects = Project.objects.visible_to(person(request)).filter(personal_owner=None)
    return render(request, "jobs/list.html", {**context, "projects": projects})


@require_GET
@page
def job(request: HttpRequest, job_id: int) -> HttpResponse:
    found = access.get_job(person(request), job_id)
    detail = job_details.detail(person(request), found)
    context = {"job": found, "detail": detail, "events": job_details.events(found)}
    if request.GET.get("part") == "live":
        return render(request, "jobs/_live.html", context)
    return render(request, "jobs/job.html", {**context, "charts": charts_of(detail), **log_card(detail)})


@require_POST
@page
def stop_job(request: HttpRequest, job_id: int) -> HttpResponse:
    found = access.get_job(person(request), job_id)
    job_service.cancel(found, actor=person(request))
    return redirect("job", job_id=job_id)


@require_GET
@page
def job_log(request: HttpRequest, job_id: int) -> HttpResponseBase:
    """`?raw=rank-0`: the whole stream as a file. `?at=rank-0:1200,…`: what came after these offsets."""
    found = access.get_job(person(request), job_id)
    if "raw" in request.GET:
        return download(found, request.GET["raw"])
    return JsonResponse(news(found, positions(request.GET.get("at", ""))))


# --- helpers ----------------------------------------------------------------------------------------------------------


def states() -> list[tuple[str, str]]:
    return [
        ("", _("All")), ("waiting", _("Waiting")), ("active", _("Running")),
        ("succeeded", _("Succeeded")), ("failed", _("Failed")), ("stopped", _("Stopped")),
    ]


def log_card(detail: job_details.JobDetail) -> dict[str, Any]:
    """Every stream there will be, and what to show first: all of a running job, one rank of an ended one."""
    sizes = {stream.name: stream.size_bytes for stream in detail.streams}
    names = [f"rank-{rank}" for rank in range(detail.asked_ranks)]
    names += [name for name in sizes if name not in names]
    streams = [{"name": name, "rank": rank_of(name), "size": sizes.get(name, 0)} for name in names]
    alone = detail.asked_ranks == 1
    first = f"rank-{detail.failing.rank}" if detail.failing else names[0]
    start = first if alone or detail.job.has_ended else ""
    return {"streams": streams, "streams_json": json.dumps(streams), "start_stream": start, "start_merged": not start}


def rank_of(name: str) -> str | None:
    return name.removeprefix("rank-") if name.startswith("rank-") else None


def charts_of(detail: job_details.JobDetail) -> dict[str, Any]:
    series = samples.for_attempt(detail.attempt) if detail.attempt else None
    return {
        "at": series.at if series else [],
        "series": {gpu.uuid: {name: gpu.mean[name] for name in CHARTED} for gpu in series.gpus} if series else {},
        "gpus": [
            {
                "uuid": gpu.uuid, "label": f"{share.node} GPU {gpu.index}", "color": share.color,
                "memory_total_bytes": gpu.memory_total_bytes, "power_limit_mw": gpu.power_limit_mw,
            }
            for share in detail.shares for gpu in share.gpus
        ],
    }


def positions(text: str) -> dict[str, int]:
    """"rank-0:12,rank-1:0" -> offsets by stream."""
    wanted: dict[str, int] = {}
    for part in text.split(",")[:PULL_STREAMS]:
        name, _colon, offset = part.partition(":")
        if not (offset.isascii() and offset.isdigit() and len(offset) < 16 and logs.STREAM_NAME.fullmatch(name)):
            raise Problem(400, "bad_position", "at: write STREAM:OFFSET pairs, such as at=rank-0:0,rank-1:512.")
        wanted[name] = int(offset)
    return wanted


def news(found: Job, wanted: dict[str, int]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    streams = logs.streams(found)
    for stream in streams:
        offset = min(wanted.get(stream.name, 0), stream.size_bytes)
        piece = logs.slice_of(stream, offset, PULL_BYTES)
        parts.append({
            "name": stream.name, "offset": piece.offset, "next_offset": piece.next_offset,
            "data": base64.b64encode(piece.data).decode(), "complete": piece.complete, "size": stream.size_bytes,
        })
    return {
        "streams": parts,
        "bytes": sum(stream.size_bytes for stream in streams),
        "more": any(part["next_offset"] < part["size"] for part in parts),
        "complete": found.has_ended and all(part["complete"] for part in parts),
    }


def download(found: Job, name: str) -> HttpResponseBase:
    stream = next((stream for stream in logs.streams(found) if stream.name == name), None)
    if stream is None:
        raise Problem(404, "no_such_log", f"Job {found.pk} has no log of this name.")
    response = StreamingHttpResponse(pieces(stream), content_type="text/plain; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="job-{found.pk}-{name}.log"'
    return response


async def pieces(stream: LogStream) -> AsyncIterator[bytes]:
    """The bytes there are now, without those that were cut from a flood."""
    offset = 0
    while offset < stream.size_bytes:
        piece = await asyncio.to_thread(logs.slice_of, stream, offset, logs.READ_LIMIT_BYTES)
        yield piece.data
        if piece.next_offset <= offset:
            return
        offset = piece.next_offset
