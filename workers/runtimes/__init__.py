"""What the ranks run in. One file per kind, one line in the table."""

import importlib

from workers.runtimes.base import Runtime

RUNTIMES = {"process": "workers.runtimes.process:ProcessRuntime"}


def load(name: str) -> type[Runtime]:
    """Raises KeyError for a runtime that is not in the table."""
    module, _, kind = RUNTIMES[name].partition(":")
    runtime: type[Runtime] = getattr(importlib.import_module(module), kind)
    return runtime
