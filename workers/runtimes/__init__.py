"""What the ranks run in. One file per kind, one line in the table."""

import sys

from workers.runtimes.base import Runtime

RUNTIMES = {"process": "workers.runtimes.process:ProcessRuntime"}


def load(name: str) -> type[Runtime]:
    """Raises KeyError for one that is not in the table. Without importlib, which costs every start a millisecond."""
    module, _, kind = RUNTIMES[name].partition(":")
    __import__(module)
    runtime: type[Runtime] = getattr(sys.modules[module], kind)
    return runtime
