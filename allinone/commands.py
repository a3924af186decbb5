"""The processes of the portal: what is called, with which environment. Nothing here imports what it starts."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from allinone.checks import has_amd_gpus, has_nvidia_gpus
from allinone.children import Child
from allinone.faults import Fault, disk_errors_named
from allinone.options import CHECKOUT, SIMULATED, Options

LARGEST_LOG_BYTES = 16 * 1024 * 1024
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE")


@dataclass(frozen=True)
class Commands:
    options: Options
    database_url: str
    redis_url: str

    # --- environments: the node's has no credential of the database -------------------------------------------------

    def base_env(self) -> dict[str, str]:
        kept = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
        tuned = {key: value for key, value in os.environ.items() if key.startswith("GPUYARD_")}
        return {**kept, **tuned, "PYTHONUNBUFFERED": "1"}

    def portal_env(self) -> dict[str, str]:
        return self.base_env() | {
            "DJANGO_SETTINGS_MODULE": "portal.settings",
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "GPUYARD_NODE_REDIS_URL": os.environ.get("GPUYARD_NODE_REDIS_URL") or without_credentials(self.redis_url),
            "GPUYARD_STATE_DIR": str(self.options.state_dir),
            "GPUYARD_PUBLIC_URL": self.options.public_url or self.options.url,
        }

    def node_env(self) -> dict[str, str]:
        env = self.base_env()
        for key in ("GPUYARD_STATE_DIR", "GPUYARD_SECRET_KEY", "GPUYARD_SIMULATE", "GPUYARD_FAULTS"):
            env.pop(key, None)
        return env | {"GPUYARD_NODE_CONFIG": str(self.node_dir / "node.json")}

    # --- services, in the order of their start ----------------------------------------------------------------------

    def node_worker(self) -> Child:
        return self._service("node", self.node_env(), "-m", "workers.app")

    def ingest(self) -> Child:
        return self._service("ingest", self.portal_env(), "manage.py", "ingest")

    def web(self) -> Child:
        return self._service(
            "web",
            self.portal_env(),
            "-m",
            "uvicorn",
            "portal.asgi:application",
            "--host",
            self.options.host,
            "--port",
            str(self.options.port),
            "--no-access-log",
            "--no-server-header",
            "--timeout-graceful-shutdown",
            "2",
        )

    def control(self) -> Child:
        return self._service(
            "control",
            self.portal_env(),
            "-m",
            "celery",
            "-A",
            "portal.celery",
            "worker",
            "-B",
            "-Q",
            "control",
            "-P",
            "threads",
            "-c",
            "2",
            "-n",
            "control@%h",
            "-s",
            str(self.options.state_dir / "beat-schedule"),
            "-l",
            "INFO",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
        )

    # --- one-off commands -------------------------------------------------------------------------------------------

    def manage(self, *arguments: str) -> str:
        """-> what it printed; a failure is a Fault with its last line."""
        return run([sys.executable, "manage.py", *arguments], self.portal_env(), f"manage.py {arguments[0]}")

    def join_node(self) -> None:
        """Makes the node's key, has the portal enrol it, and stores the answer. Repeating it changes nothing."""
        options = ["--state-dir", str(self.node_dir), "--node", self.options.node]
        public_key = self._join(*options).strip()
        answer = self.manage("enroll", self.options.node, public_key, "--replace")
        simulate, faults = self.topology(), self.options.faults
        options += ["--simulate", simulate] if simulate else []
        options += ["--fault", faults] if faults else []
        self._join(*options, "--config", "-", text=only_json(answer))

    def topology(self) -> str:
        """The simulated machine, or nothing where real GPUs are."""
        return self.options.simulate or ("" if has_nvidia_gpus() or has_amd_gpus() else SIMULATED)

    @property
    def node_dir(self) -> Path:
        return self.options.state_dir / "node"

    @property
    def log_dir(self) -> Path:
        return self.options.state_dir / "log"

    def _join(self, *arguments: str, text: str = "") -> str:
        return run([sys.executable, "-m", "workers.join", *arguments], self.node_env(), "workers.join", text)

    def _service(self, name: str, env: Mapping[str, str], *arguments: str) -> Child:
        return Child(name, [sys.executable, *arguments], log_file(self.log_dir, name), env, cwd=CHECKOUT)


def run(argv: list[str], env: Mapping[str, str], title: str, text: str = "") -> str:
    answer = subprocess.run(argv, env=dict(env), cwd=CHECKOUT, input=text, text=True, check=False, capture_output=True)
    if answer.returncode != 0:
        words = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()
        raise Fault(f"{title} failed (exit status {answer.returncode}): {words[-1]}")
    return answer.stdout


def only_json(text: str) -> str:
    """The JSON object in what a command printed."""
    start, end = text.find("{"), text.rfind("}")
    try:
        return json.dumps(json.loads(text[start : end + 1]))
    except ValueError as error:
        raise Fault(f"manage.py enroll answered no JSON object but: {text.strip()[:200]!r}") from error


def log_file(log_dir: Path, name: str) -> Path:
    """A log that has grown large is kept once and begun anew."""
    path = log_dir / f"{name}.log"
    with disk_errors_named(path):
        log_dir.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
    return path


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
