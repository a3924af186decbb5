"""What is wrong with a specification, in sentences that name the field and the way out."""

from typing import Any

from pydantic import ValidationError

from portal.services.errors import Problem

CROSS_FIELD = ("layout: ", "env: ", "resources.gpus: ", "resources.link: ")
"""Checks over several fields name the field that they are about in front of their sentence."""


def described(error: ValidationError) -> Problem:
    errors = [entry(item) for item in error.errors(include_url=False, include_input=False)]
    unknown = all(item["type"] == "extra_forbidden" for item in error.errors(include_url=False, include_input=False))
    detail = " ".join(f"{item['field']}: {item['message']}." for item in errors[:5])
    return Problem(400, "unknown_field" if unknown else "invalid_spec", detail, errors=errors)


def entry(item: Any) -> dict[str, str]:
    field = ".".join(str(part)[:60] for part in item["loc"] if part != "[key]")
    message = sentence(item["type"], item.get("ctx", {}), str(item["msg"]))
    for prefix in CROSS_FIELD:
        if message.startswith(prefix):
            return {"field": prefix.removesuffix(": "), "message": message.removeprefix(prefix)}
    return {"field": field or "specification", "message": message}


def sentence(kind: str, context: dict[str, Any], fallback: str) -> str:
    fixed = {
        "missing": "is missing",
        "extra_forbidden": "is not a field of the specification",
        "int_type": "write a whole number, without quotes",
        "int_from_float": "write a whole number",
        "int_parsing_size": "is too large",
        "string_type": "write text; quote it if it looks like a number",
        "dict_type": "write names with values",
        "model_type": "write an object with fields",
        "model_attributes_type": "write an object with fields",
        "list_type": "write one name or a list of names",
        "string_too_short": "is empty",
    }
    limits = {
        "greater_than_equal": "at least {ge}",
        "less_than_equal": "at most {le}",
        "string_too_long": "at most {max_length} characters",
        "too_long": "at most {max_length} entries",
        "literal_error": "use {expected}",
    }
    if kind == "value_error":
        return str(context.get("error", fallback))
    if kind in limits:
        return limits[kind].format(**context)
    return fixed.get(kind, fallback[:1].lower() + fallback[1:])
