"""From what a person asked for to one command line per node, and from what it left behind to who failed and why."""

import os
import pwd
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Protocol

from wire.desired import GpuSlot, Launch
from wire.reports import RankExit
from workers.plan import Limits, Plan
from workers.spool import AttemptDir

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

TMPDIR_CHARS = 72
"""A socket's path may have 107 characters, of which Python's multiprocessing takes 33: a longer folder is not used."""

UNKILLABLE_S = 60.0
"""Of killing in vain, after which a person is told."""

ROCR_UUID = re.compile(r"GPU-[0-9a-fA-F]{1,16}")

TAIL_BYTES = 16 * 1024
MESSAGE_CHARS = 500

TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f]")
ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?::|$)|^(?:fatal|error)\b\W", re.IGNORECASE)


class LaunchError(Exception):
    """The job cannot be started as it was asked for; the text is one sentence for the person who asked."""


class Launcher(Protocol):
    def plan(self, launch: Launch, attempt: AttemptDir, job_path: str = "") -> Plan:
        """Raises LaunchError."""
        ...

    def rank_exits(self, launch: Launch, attempt: AttemptDir, ended: RankExit) -> list[RankExit]:
        """What is known of each rank that failed, the first to fail first. `ended` tells of the command itself."""
        ...


def words_of(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"the command cannot be split into words ({str(error).lower()}): {command[:200]}") from error
    if not words:
        raise LaunchError("the command is empty")
    return words


def working_directory(launch: Launch, attempt: AttemptDir) -> str:
    if launch.workdir is None:
        return str(attempt.path / "work")
    if not launch.workdir.startswith("/"):
        raise LaunchError(f"the working directory must be an absolute path, not {launch.workdir!r}")
    if not Path(launch.workdir).is_dir():
        raise LaunchError(f"the working directory {launch.workdir} does not exist on this node")
    return launch.workdir


def job_environment(launch: Launch, attempt: AttemptDir, job_path: str) -> dict[str, str]:
    """Built from empty: nothing of the worker's own environment reaches a job. What names the job, it cannot set."""
    account = pwd.getpwuid(os.getuid())
    env = {
        "PATH": job_path or f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name, "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1", "MASTER_ADDR": launch.master_address,
    }
    own_tmp = str(attempt.path / "tmp")
    if len(own_tmp) <= TMPDIR_CHARS:
        env["TMPDIR"] = own_tmp
    if "TZ" in os.environ:
        env["TZ"] = os.environ["TZ"]
    if launch.master_port is not None:
        env["MASTER_PORT"] = str(launch.master_port)
    env.update(checked_variables(launch.env))
    env.update(visible_devices(launch.gpus))
    env.update({
        "GPUYARD_JOB_ID": str(launch.job), "GPUYARD_JOB_NAME": launch.name, "GPUYARD_USER": launch.user,
        "GPUYARD_ATTEMPT_ID": launch.attempt, "GPUYARD_ATTEMPT": str(launch.epoch),
        "GPUYARD_NODE_RANK": str(launch.node_rank), "GPUYARD_NODE_COUNT": str(launch.node_count),
        "GPUYARD_WORLD_SIZE": str(launch.world_size), "GPUYARD_LOG_DIR": str(attempt.log_path("x").parent),
    })
    env.update({f"GPUYARD_{name.upper()}_PARALLEL": str(size) for name, size in launch.layout.items()})
    return env


def visible_devices(slots: list[GpuSlot]) -> dict[str, str]:
    """Of the cards of a maker that the job was given none of, it sees none."""
    amd = [slot for slot in slots if slot.vendor == "amd"]
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(slot.uuid for slot in slots if slot.vendor != "amd"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # Part of a chip that shares its serial number with the others has only its place to be named by.
        "ROCR_VISIBLE_DEVICES": ",".join(
            slot.uuid if ROCR_UUID.fullmatch(slot.uuid) else str(slot.index) for slot in amd),
    }
    if amd:
        # HIP counts anew what ROCR leaves over; without a value of its own it would look at CUDA's.
        env["HIP_VISIBLE_DEVICES"] = ",".join(map(str, range(len(amd))))
    return env


def checked_variables(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise LaunchError(f"{name!r} cannot be set in the environment: it is empty, or holds «=» or a NUL byte")
    return variables


def program(words: list[str], cwd: str, env: dict[str, str]) -> list[str]:
    """-> the words with the first one resolved to a file that the kernel can execute."""
    first = words[0]
    if first.endswith(".py"):
        return [python(env), "-u", *words]
    path = env["PATH"]
    found = os.path.join(cwd, first) if "/" in first else shutil.which(first, path=path)  # noqa: PTH118
    if found is None and (Path(cwd) / first).is_file():
        found = str(Path(cwd) / first)
    if found is None:
        raise LaunchError(f"{first} was not found: it is not on the job's PATH ({path}) and not in {cwd}")
    if not Path(found).is_file():
        raise LaunchError(f"{found} does not exist on this node or is not a file")
    if not os.access(found, os.X_OK):
        raise LaunchError(f"{found} is not executable; use chmod +x, or name its interpreter in the command")
    return [found, *words[1:]]


def python(env: dict[str, str]) -> str:
    return shutil.which("python", path=env["PATH"]) or shutil.which("python3", path=env["PATH"]) or sys.executable


def limits(launch: Launch) -> Limits:
    return Limits(grace_s=launch.stop_grace_s, time_limit_s=launch.time_limit_s, log_cap_bytes=launch.log_cap_bytes,
                  unkillable_s=UNKILLABLE_S)


def last_error_line(path: Path) -> str | None:
    """-> the last line that names an error, else the last line with anything on it; of the last few kilobytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except OSError:
        return None
    frames = [line.rstrip("\r").rpartition("\r")[2] for line in tail.decode("utf-8", "replace").split("\n")]
    lines = [text for frame in frames if (text := TERMINAL_CODES.sub("", frame).strip())]
    named = [line for line in lines if ERROR_LINE.search(line)]
    found = (named or lines)[-1:]
    return found[0][:MESSAGE_CHARS] if found else None
