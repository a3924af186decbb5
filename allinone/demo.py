"""The demo: what a user would do, over REST, told in the terminal and summed up at the end."""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from allinone.faults import Fault
from allinone.options import CHECKOUT
from allinone.stack import MEMBER, Stack
from allinone.terminal import Terminal
from client.api import ENDED, Client
from client.errors import ClientError
from client.following import Away, Following, Item, LogLine, StateChange

GPUS = 4
GLOBAL_BATCH = 1024


@dataclass(frozen=True)
class Summary:
    """What the last line of `make demo DEMO_EXIT=1` says as JSON. Unknown is null."""

    state: str
    job: int
    ranks: int
    gpus: int
    log_lines: int
    log_bytes: int
    telemetry_samples: int
    queued_s: float | None
    starting_s: float | None
    running_s: float | None
    reason: str | None
    url: str


def spec() -> dict[str, Any]:
    return {
        "name": "ddp-demo",
        "launcher": "torchrun",
        "command": f"train_ddp.py --global-batch {GLOBAL_BATCH}",
        "source": {"path": str(CHECKOUT / "examples")},
        "resources": {"gpus": GPUS},
        "layout": {"data": GPUS},
        "time_limit": "15m",
    }


def run(stack: Stack) -> Summary:
    """Submits, follows, sums up. The services are tended while the log is read."""
    with stack.client(MEMBER) as portal:
        try:
            return tell(stack, portal)
        except ClientError as error:
            raise Fault(f"The demo's job could not be followed: {error}") from error


def tell(stack: Stack, portal: Client) -> Summary:
    terminal = stack.terminal
    job = portal.submit(spec())
    batches = f"global batch {GLOBAL_BATCH} as {GPUS} × {GLOBAL_BATCH // GPUS}"
    terminal.say(f"\nJob #{job['id']}: examples/train_ddp.py on {GPUS} GPUs, {batches}")

    def pause(seconds: float) -> None:
        stack.tend()
        time.sleep(seconds)

    following = Following(portal, job["id"], pause=pause, interval_s=0.1)
    lines = sum(show(terminal, item) for item in following.items())
    return summary(portal, job["id"], lines, following)


def show(terminal: Terminal, item: Item) -> int:
    """-> how many log lines that was."""
    if isinstance(item, LogLine):
        terminal.rank_line(item.rank, item.text)
        return 1
    if isinstance(item, StateChange):
        why = (item.job["reason"] or {}).get("message")
        terminal.say(f"  {terminal.paint(item.state, 1)}{f': {why}' if why else ''}")
    if isinstance(item, Away):
        terminal.say(f"  {item.message}")
    return 0


def summary(portal: Client, job_id: int, lines: int, following: Following) -> Summary:
    job, metrics = portal.job(job_id), portal.metrics(job_id)
    times, reason = job["times"], job["reason"]
    attempt = job["attempts"][-1] if job["attempts"] else {}
    return Summary(
        state=job["state"],
        job=job_id,
        ranks=job["world_size"],
        gpus=len(attempt.get("allocation", [])),
        log_lines=lines,
        log_bytes=following.bytes_read,
        telemetry_samples=metrics["sample_count"],
        queued_s=times["queued_s"],
        starting_s=times["starting_s"],
        running_s=times["running_s"],
        reason=reason["message"] if reason and job["state"] in ENDED - {"succeeded"} else None,
        url=f"{portal.url}/jobs/{job_id}/",
    )


def print_summary(terminal: Terminal, result: Summary) -> None:
    good = result.state == "succeeded"
    terminal.say(f"\n{terminal.paint(result.state, 32 if good else 31)}{f': {result.reason}' if result.reason else ''}")
    spent = {"queued": result.queued_s, "starting": result.starting_s, "running": result.running_s}
    rows = {
        "time": " · ".join(f"{name} {seconds(value)}" for name, value in spent.items()),
        "ranks": f"{result.ranks} on {result.gpus} GPUs",
        "log": f"{result.log_lines} lines, {result.log_bytes} bytes",
        "telemetry": f"{result.telemetry_samples} samples of these GPUs",
        "browser": result.url,
    }
    for name, text in rows.items():
        terminal.say(f"  {name:<10}{text}")


def seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f} s"


def as_json(result: Summary) -> str:
    return json.dumps(asdict(result))
