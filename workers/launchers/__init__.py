"""How ranks start. One file per launcher, one line in the table."""

import importlib

from workers.launchers.base import Launcher, LaunchError

LAUNCHERS = {
    "script": "workers.launchers.script:ScriptLauncher",
    "torchrun": "workers.launchers.torchrun:TorchrunLauncher",
}


def load(name: str) -> Launcher:
    """Raises LaunchError for a launcher that this node does not know."""
    if name not in LAUNCHERS:
        raise LaunchError(f"this node has no launcher {name!r}; it has {', '.join(sorted(LAUNCHERS))}")
    module, _, kind = LAUNCHERS[name].partition(":")
    launcher: Launcher = getattr(importlib.import_module(module), kind)()
    return launcher
