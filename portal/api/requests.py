"""Reading what a client sent: strictly, and with a sentence for whatever is wrong."""

import json
from typing import Any

from django.conf import settings
from django.http import HttpRequest

from portal.services import specs
from portal.services.errors import Problem
from portal.services.specs import JobSpec

JSON_TYPES = frozenset({"application/json"})
YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml"})


def job_spec(request: HttpRequest) -> JobSpec:
    """The body, JSON or YAML, as a validated specification. Raises Problem 400, 413, 415 or 422."""
    kind = (request.content_type or "").lower()
    if kind not in JSON_TYPES | YAML_TYPES:
        raise Problem(415, "unsupported_media_type", "Send the job as application/json or application/yaml.")
    text = _text(request)
    return specs.parse(_json(text)) if kind in JSON_TYPES else specs.from_yaml(text)


def allow_only(request: HttpRequest, *names: str) -> None:
    """Refuse query parameters that the route does not have, instead of ignoring them."""
    unknown = sorted(set(request.GET) - set(names))
    if unknown:
        known = ", ".join(names) or "none"
        detail = f"Unknown parameter {unknown[0]!r}; this address takes: {known}."
        raise Problem(400, "unknown_parameter", detail, errors=[{"field": unknown[0], "message": "unknown parameter"}])


def _text(request: HttpRequest) -> str:
    body = request.body
    if len(body) > settings.MAX_BODY_BYTES:
        raise Problem(413, "body_too_large", "The body is larger than the 1 MiB that a request may have.")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(400, "invalid_encoding", f"The body is not UTF-8: byte {error.start} does not belong.") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError as error:
        raise Problem(400, "invalid_json", "The body is nested too deeply.") from error
    except ValueError as error:
        raise Problem(400, "invalid_json", f"The body is not JSON: {error}.") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
