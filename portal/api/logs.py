"""The bytes that a job's ranks wrote."""

from typing import Literal

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from ninja import Router

from portal.api.auth import user_of
from portal.api.requests import allow_only
from portal.services import access, logs, streaming
from portal.services.errors import Problem

router = Router()
MAX_SLICE_BYTES = 4 * 1024 * 1024
Rank = int | Literal["launcher"]


@router.get("/{int:job_id}/logs", url_name="job_logs", summary="Raw log bytes of one rank")
def read(request: HttpRequest, job_id: int, rank: Rank = 0, offset: int = 0, limit: int = 1024 * 1024) -> HttpResponse:
    """Bytes from `offset`. X-Next-Offset is where to go on; X-Log-Complete: true once the rank's log is whole."""
    allow_only(request, "rank", "offset", "limit")
    _check("offset", offset, least=0)
    _check("limit", limit, least=1)
    job = access.get_job(user_of(request), job_id)
    piece = logs.read(job, rank, offset, min(limit, MAX_SLICE_BYTES))
    response = HttpResponse(piece.data, content_type="text/plain; charset=utf-8")
    response["X-Next-Offset"] = str(piece.next_offset)
    response["X-Log-Complete"] = "true" if piece.complete else "false"
    # Whatever a job prints is shown as text, or saved; it never runs on our origin.
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    response["Content-Disposition"] = f'attachment; filename="job-{job.pk}-{rank_name(rank)}.log"'
    response["Cache-Control"] = "no-store"
    return response


@router.get("/{int:job_id}/logs/stream", url_name="job_log_stream", summary="Follow one rank's log (SSE)")
async def stream(request: HttpRequest, job_id: int, rank: Rank = 0, offset: int = 0) -> HttpResponseBase:
    """Events: id = byte offset after the piece, data = {"offset", "data" (base64)}; `complete` once it is whole."""
    allow_only(request, "rank", "offset")
    _check("offset", offset, least=0)
    start = streaming.resume_offset(request.headers.get("Last-Event-ID"), offset)
    user = user_of(request)
    return await streaming.sse_response(user.pk, streaming.job_log(user.pk, job_id, rank, start))


def rank_name(rank: Rank) -> str:
    return rank if isinstance(rank, str) else f"rank-{rank}"


def _check(field: str, value: int, *, least: int) -> None:
    if not least <= value < 2**63:
        detail = f"{field}: {value} is not possible; it is a number of bytes, at least {least}."
        raise Problem(400, "invalid_parameter", detail, errors=[{"field": field, "message": f"at least {least}"}])
