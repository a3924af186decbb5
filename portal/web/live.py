"""The pages' live streams. Refusals are problems, not redirects: an EventSource can do nothing with a login page."""

from collections.abc import AsyncIterator

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase

from portal.services import streaming
from portal.services.errors import Problem
from portal.services.sse import ServerEvent


async def cluster(request: HttpRequest) -> HttpResponseBase:
    user_id = await signed_in(request)
    return await answer(user_id, streaming.cluster(user_id) if user_id else None)


async def job(request: HttpRequest, job_id: int) -> HttpResponseBase:
    user_id = await signed_in(request)
    return await answer(user_id, streaming.job_events(user_id, job_id) if user_id else None)


async def job_log(request: HttpRequest, job_id: int) -> HttpResponseBase:
    user_id = await signed_in(request)
    if not user_id:
        return await answer(None, None)
    rank, offset = request.GET.get("rank", "0"), request.GET.get("offset", "0")
    if not whole(offset) or not (whole(rank) or rank == "launcher"):
        return refusal(Problem(400, "invalid_parameter", "rank is a number or launcher, offset a number of bytes."))
    start = streaming.resume_offset(request.headers.get("Last-Event-ID"), int(offset))
    which = int(rank) if whole(rank) else rank
    return await answer(user_id, streaming.job_log(user_id, job_id, which, start))


async def signed_in(request: HttpRequest) -> int | None:
    user = await request.auser()
    return user.pk if user.is_authenticated else None


async def answer(user_id: int | None, events: AsyncIterator[ServerEvent] | None) -> HttpResponseBase:
    if user_id is None or events is None:
        return refusal(Problem(401, "not_authenticated", "Sign in again: this session has ended."))
    try:
        return await streaming.sse_response(user_id, events)
    except Problem as problem:
        return refusal(problem)


def refusal(problem: Problem) -> HttpResponse:
    body = {"type": problem.code, "status": problem.status, "detail": problem.detail, "errors": problem.errors}
    return JsonResponse(body, status=problem.status, content_type="application/problem+json", headers=problem.headers)


def whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19
