"""PyTorch's elastic launcher: one rank per GPU, each rank's output straight into its own file.

torchrun can only redirect stdout and stderr into two files, or copy them through a pipe. A shell between it and the
rank opens the one file and then becomes the rank: the order is kept and nobody stands between the rank and the disk.
"""

import json
import re
from pathlib import Path

from wire.desired import Launch
from wire.reports import RankExit
from workers.launchers import base
from workers.plan import Plan
from workers.spool import AttemptDir

LAUNCHER_STREAM = "launcher"
BECOME_RANK = 'exec "$@" >>"$GPUYARD_LOG_DIR/rank-$RANK.log" 2>&1'

SUMMARY_BYTES = 64 * 1024
FAILURE = re.compile(r"rank\s*:\s*(?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(?P<code>-?\d+)")
ROOT_CAUSE = "Root Cause"


class TorchrunLauncher:
    def plan(self, launch: Launch, attempt: AttemptDir, job_path: str = "") -> Plan:
        cwd = base.working_directory(launch, attempt)
        env = {"OMP_NUM_THREADS": "1"} | base.job_environment(launch, attempt, job_path)
        argv = [base.python(env), "-m", "torch.distributed.run", *rendezvous(launch), "--max-restarts=0",
                f"--log-dir={attempt.path / 'errors'}", "--no-python", "--",
                "/bin/sh", "-c", BECOME_RANK, "rank", *rank_words(launch, cwd, env)]
        streams = [LAUNCHER_STREAM, *(f"rank-{rank}" for rank in ranks(launch))]
        # torchrun hands SIGTERM on to its ranks and waits for them.
        return Plan(argv, env, cwd, streams, stops_tree=False, limits=base.limits(launch))

    def rank_exits(self, launch: Launch, attempt: AttemptDir, ended: RankExit) -> list[RankExit]:
        """From torchrun's own summary and the files that ranks with `@record` leave."""
        if ended.exit_code == 0:
            return [RankExit(rank=rank, exit_code=0, ended_at=ended.ended_at) for rank in ranks(launch)]
        messages = recorded_errors(attempt.path / "errors", launch.first_rank)
        failed = failures(attempt.log_path(LAUNCHER_STREAM))
        exits = [self._exit(attempt, rank, code, messages) for rank, code in failed]
        return [one for one in exits if one.rank in ranks(launch)]  # another node tells of its own ranks

    def _exit(self, attempt: AttemptDir, rank: int, code: int, messages: dict[int, str]) -> RankExit:
        message = messages.get(rank) or base.last_error_line(attempt.log_path(f"rank-{rank}"))
        if code < 0:
            return RankExit(rank=rank, signal=-code, message=message)
        return RankExit(rank=rank, exit_code=code, message=message)


def ranks(launch: Launch) -> range:
    return range(launch.first_rank, launch.first_rank + max(1, len(launch.gpus)))


def rendezvous(launch: Launch) -> list[str]:
    here = [f"--nproc-per-node={len(ranks(launch))}", f"--nnodes={launch.node_count}", f"--rdzv-id={launch.attempt}"]
    if launch.node_count == 1:
        # Port 0: the system gives a free one, so two jobs on one machine never meet.
        return [*here, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    if launch.master_port is None:
        raise base.LaunchError("a job on several nodes needs a port of its first node to meet at; none was given")
    # A dynamic rendezvous would deal out the ranks as nodes arrive; here each node has the ranks of its order.
    return [*here, "--rdzv-backend=static", f"--node-rank={launch.node_rank}",
            f"--master-addr={launch.master_address}", f"--master-port={launch.master_port}"]


def rank_words(launch: Launch, cwd: str, env: dict[str, str]) -> list[str]:
    """As torchrun itself would take them: a script, `-m module`, or a program."""
    words = base.words_of(launch.command)
    if words[0] == "-m":
        return [base.python(env), "-u", *words]
    if words[0].endswith(".py") and not (Path(cwd) / words[0]).is_file():
        raise base.LaunchError(f"{Path(cwd) / words[0]} does not exist on this node")
    return base.program(words, cwd, env)


def failures(path: Path) -> list[tuple[int, int]]:
    """-> (rank, exit code or minus signal) from torchrun's summary, the root cause first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - SUMMARY_BYTES))
            text = file.read(SUMMARY_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    root = text.rfind(ROOT_CAUSE)
    found = [(match.start() > root, int(match["rank"]), int(match["code"])) for match in FAILURE.finditer(text)]
    found.sort(key=lambda item: not item[0])
    return list({rank: (rank, code) for _, rank, code in reversed(found)}.values())[::-1]


def recorded_errors(folder: Path, first_rank: int) -> dict[int, str]:
    """-> rank: message, from `error.json` files named by local rank."""
    found: dict[int, str] = {}
    for path in sorted(folder.rglob("error.json")):
        try:
            message = json.loads(path.read_bytes())["message"]
            text = message["message"] if isinstance(message, dict) else message
            found[first_rank + int(path.parent.name)] = str(text).strip().splitlines()[0][:base.MESSAGE_CHARS]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # a rank may die while it writes
    return found
