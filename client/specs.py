"""A job's file on the way to the portal: read, adapted by --set, else sent as it is."""

import sys
from pathlib import Path
from typing import Any

import yaml

from client.errors import ClientError


class SpecError(ClientError):
    exit_code = 2


def read(source: str) -> dict[str, Any]:
    """A YAML or JSON file; - is standard input."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        spec = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise SpecError(f"{source}{where} is not YAML: {getattr(error, 'problem', None) or error}.") from error
    if not isinstance(spec, dict):
        raise SpecError(f"{source} holds no job: it needs keys such as name, launcher, command and resources.")
    return spec


def override(spec: dict[str, Any], assignments: tuple[str, ...]) -> dict[str, Any]:
    """`resources.gpus=8` sets that key; the value is read as YAML, so 8 is a number and [A100, H100] a list."""
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SpecError(f"--set {assignment} has no '=': write --set resources.gpus=8.")
        *parents, last = name.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise SpecError(f"--set {assignment}: {parent} is a value here and has nothing below it.")
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SpecError(f"--set {assignment}: the value is not YAML.") from error
    return spec
