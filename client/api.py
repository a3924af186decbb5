"""The Python client. `Client(url, token).submit(spec)` and the rest of REST, with plain dictionaries as answers.

>>> with Client("http://127.0.0.1:8000", "gy_…") as portal:
...     job = portal.submit({"name": "hello", "launcher": "script", "command": "sh -c 'echo hi'"})
...     for line in portal.follow(job["id"]):
...         print(line.rank, line.text)
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from client.errors import ClientError, FieldError, Refused, Unreachable

Answer = dict[str, Any]
Rank = int | str  # "launcher" is the launcher's own output
ENDED = frozenset({"succeeded", "failed", "stopped"})
TRIES = 4
LOG_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class LogPiece:
    """Raw bytes of one rank from an offset; `complete` once its log is whole and read to the end."""

    rank: Rank
    data: bytes
    next_offset: int
    complete: bool


class Client:
    """Waits out short absences of the portal; a submit carries a key that makes it safe to repeat."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 15.0,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._pause = pause
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            timeout=timeout_s,
            transport=transport,
            headers={"Authorization": f"Bearer {token}", "User-Agent": "gpuyard-client"},
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def me(self) -> Answer:
        return self._json("GET", "me")

    def submit(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> Answer:
        key = idempotency_key or str(uuid.uuid4())
        return self._json("POST", "jobs", json=dict(spec), headers={"Idempotency-Key": key})

    def jobs(self, *, limit: int | None = None, **filters: str | None) -> Iterator[Answer]:
        """Newest first, page by page. Filters: state, owner, project, name."""
        return islice(self._all_jobs(filters), limit)

    def job(self, job_id: int) -> Answer:
        return self._json("GET", f"jobs/{job_id}")

    def cancel(self, job_id: int) -> Answer:
        return self._json("POST", f"jobs/{job_id}/cancel")

    def events(self, job_id: int) -> list[Answer]:
        return list(self._json("GET", f"jobs/{job_id}/events")["events"])

    def metrics(self, job_id: int) -> Answer:
        return self._json("GET", f"jobs/{job_id}/metrics")

    def logs(self, job_id: int, rank: Rank = 0, offset: int = 0, limit: int = LOG_PIECE_BYTES) -> LogPiece:
        answer = self._request("GET", f"jobs/{job_id}/logs", params={"rank": rank, "offset": offset, "limit": limit})
        return LogPiece(
            rank,
            answer.content,
            int(answer.headers.get("X-Next-Offset", offset + len(answer.content))),
            answer.headers.get("X-Log-Complete") == "true",
        )

    def nodes(self) -> list[Answer]:
        return list(self._json("GET", "nodes")["nodes"])

    def node(self, name: str) -> Answer:
        return self._json("GET", f"nodes/{name}")

    def gpus(self, **filters: str | None) -> list[Answer]:
        return list(self._json("GET", "gpus", params=without_none(filters))["gpus"])

    def _all_jobs(self, filters: Mapping[str, str | None]) -> Iterator[Answer]:
        cursor = None
        while True:
            page = self._json("GET", "jobs", params=without_none({**filters, "cursor": cursor}))
            yield from page["jobs"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def _json(self, method: str, path: str, **options: Any) -> Answer:
        answer = self._request(method, path, **options)
        try:
            return dict(answer.json())
        except ValueError as error:
            raise ClientError(f"{self.url} answered {path} with no JSON; is that a gpuyard?") from error

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Every request here may be repeated: reads, cancel, and a submit with its key."""
        for attempt in range(1, TRIES + 1):
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if attempt == TRIES:
                    raise Unreachable(
                        f"{self.url} cannot be reached ({error or type(error).__name__}); "
                        "check the address and whether the portal runs."
                    ) from error
            else:
                if answer.status_code not in {429, 503} or attempt == TRIES:
                    return checked(answer)
            self._pause(0.25 * 2**attempt)
        raise AssertionError("the last try returns or raises")


def checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    fields = [FieldError(str(item.get("field", "")), str(item.get("message", ""))) for item in body.get("errors") or []]
    detail = str(body.get("detail") or f"The portal answered {answer.status_code} without a reason.")
    raise Refused(answer.status_code, str(body.get("type") or answer.status_code), detail, fields)


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
