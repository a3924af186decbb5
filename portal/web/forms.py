"""The form, the YAML and the commands of a new job are one object: this turns each into the other.

Checking is left to services.specs alone. What the form has no field for (a layout, say) stays as the YAML has it.
"""

import json
import shlex
from collections.abc import Mapping
from datetime import date
from typing import Any

import yaml
from django.conf import settings
from django.http import QueryDict

from portal.services.errors import Problem
from portal.services.specs import JobSpec, load_yaml, to_yaml

# Field of the form -> place in the specification.
PLACES: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "project": ("project",),
    "gpus": ("resources", "gpus"),
    "nodes": ("resources", "nodes"),
    "memory": ("resources", "memory"),
    "models": ("resources", "gpu"),
    "link": ("resources", "link"),
    "launcher": ("launcher",),
    "command": ("command",),
    "source": ("source", "path"),
    "env": ("env",),
    "time_limit": ("time_limit",),
    "retries": ("retries",),
    "data": ("layout", "data"),
    "tensor": ("layout", "tensor"),
    "pipeline": ("layout", "pipeline"),
}
NUMBERS = frozenset({"gpus", "nodes", "retries", "data", "tensor", "pipeline"})
DEFAULTS: dict[str, Any] = {"link": "any", "launcher": "script", "gpus": 1, "nodes": 1, "retries": 0}
DDP_EXAMPLE = "train_ddp.py"


def spec_data(form: QueryDict) -> object:
    """What was asked for, unchecked: from the side that was edited last."""
    written = form.get("yaml", "")
    if form.get("edited") == "yaml":
        return load_yaml(written)
    try:
        base = load_yaml(written) if written.strip() else {}
    except Problem:
        base = {}
    data = base if isinstance(base, dict) else {}
    for field in PLACES:
        put(data, PLACES[field], field_value(field, form))
    return data


def form_values(data: object) -> dict[str, Any]:
    """Specification -> what the fields of the form show."""
    values: dict[str, Any] = {}
    for field, place in PLACES.items():
        value = get(data, place)
        values[field] = DEFAULTS.get(field, "") if value is None else value
    values["models"] = as_list(values["models"])
    values["env"] = env_text(values["env"])
    nodes = values["nodes"]
    values["nodes"] = f"{nodes.get('min')} to {nodes.get('max')}" if isinstance(nodes, dict) else nodes
    return {field: value if field == "models" or plain(value) else "" for field, value in values.items()}


def field_errors(problem: Problem) -> dict[str, list[str]]:
    """Errors by field of the form; what belongs to none of them is under ""."""
    found: dict[str, list[str]] = {}
    for error in problem.errors or [{"field": "", "message": problem.detail}]:
        field = field_of(error["field"])
        found.setdefault(field, []).append(sentence(error["message"], "" if field else error["field"]))
    return found


def commands(spec: JobSpec) -> dict[str, str]:
    """The same request for a terminal."""
    body = json.dumps(spec.stored(), ensure_ascii=False)
    curl = [
        f"curl -X POST {settings.PUBLIC_URL}/api/v1/jobs \\", '  -H "Authorization: Bearer $GPUYARD_TOKEN" \\',
        '  -H "Content-Type: application/json" \\', f"  --data-raw {shlex.quote(body)}",
    ]
    cli = f"cat > job.yaml <<'END'\n{to_yaml(spec)}END\ngpuyard submit job.yaml --follow"
    return {"curl": "\n".join(curl), "cli": cli}


def example_data(name: str) -> dict[str, Any] | None:
    """A request that trains a small network on 4 GPUs, if this installation has the script for it."""
    folder = settings.BASE_DIR / "examples"
    if name != "ddp" or not (folder / DDP_EXAMPLE).is_file():
        return None
    return {
        "name": "ddp-example", "launcher": "torchrun", "command": DDP_EXAMPLE, "layout": {"data": 4},
        "source": {"path": str(folder)}, "resources": {"gpus": 4}, "time_limit": "30m",
    }


def dumped(data: object) -> str:
    """Data -> YAML, also when it is not a valid specification yet."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


# --- helpers ----------------------------------------------------------------------------------------------------------


def field_value(field: str, form: QueryDict) -> Any:
    if field == "models":
        return [model for model in form.getlist("models") if model] or None
    text = form.get(field, "").strip()
    if not text:
        return None
    if field == "env":
        return env_data(text)
    if field == "nodes":
        return nodes_data(text)
    value = number(text) if field in NUMBERS else text
    return None if DEFAULTS.get(field) == value and field != "launcher" and field != "gpus" else value


def number(text: str) -> int | str:
    """Text that is no whole number stays text, so that the one validator says what is wrong with it."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 12 else text


def nodes_data(text: str) -> Any:
    least, to, most = text.partition(" to ")
    if to:
        return {"min": number(least.strip()), "max": number(most.strip())}
    value = number(text)
    return None if value == 1 else value


def env_data(text: str) -> Any:
    """NAME=value lines -> names with values; a line without = stays visible as an error of that name."""
    pairs: dict[str, Any] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if line.strip():
            pairs[name.strip()] = value if equals else None
    return pairs


def env_text(value: object) -> str:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return "\n".join(f"{name}={text}" for name, text in pairs if plain(name) and plain(text))


def as_list(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(item) for item in values if plain(item) and item != ""]


def plain(value: Any) -> bool:
    return isinstance(value, str | int | float | date)


def get(data: object, place: tuple[str, ...]) -> Any:
    for name in place:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def put(data: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    """Set or, with None, remove; an object that becomes empty goes as well."""
    *outer, last = place
    holder = data
    for name in outer:
        inner = holder.get(name)
        if not isinstance(inner, dict):
            if value is None:
                return
            inner = holder[name] = {}
        holder = inner
    if value is None:
        holder.pop(last, None)
    else:
        holder[last] = value
    if outer and not holder:
        data.pop(outer[0], None)


def field_of(path: str) -> str:
    """resources.gpu.0 -> models"""
    parts = tuple(path.split("."))
    for field, place in PLACES.items():
        if parts[: len(place)] == place:
            return field
    return {"layout": "data", "source": "source"}.get(parts[0], "")


def sentence(message: str, path: str) -> str:
    text = f"{path}: {message}" if path else message[:1].upper() + message[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
