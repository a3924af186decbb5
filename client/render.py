"""Answers as people read them."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

Answer = dict[str, Any]
STATE_COLOURS = {
    "running": "green",
    "succeeded": "green",
    "failed": "red",
    "stopped": "yellow",
    "stopping": "yellow",
    "starting": "cyan",
    "waiting": "cyan",
    "ready": "green",
    "suspect": "yellow",
    "unreachable": "red",
}
RANK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_red")
NOTHING = "–"


def jobs(rows: Iterable[Answer]) -> list[str]:
    head = ("ID", "STATE", "NAME", "OWNER", "GPUS", "SUBMITTED", "REASON")
    return table(
        head,
        [
            (
                str(job["id"]),
                job["state"],
                job["name"],
                job["owner"],
                str(job["gpus"]),
                ago(job["times"]["submitted_at"]),
                reason(job),
            )
            for job in rows
        ],
    )


def job(answer: Answer) -> list[str]:
    times, held = answer["times"], answer["allocation"]
    lines = [f"#{answer['id']} {shown(answer['name'])}   {state(answer['state'])}"]
    lines += [f"  {text}" for text in filter(None, [reason(answer)])]
    lines += facts(
        {
            "project": f"{answer['project']}, submitted by {answer['owner']} {ago(times['submitted_at'])}",
            "times": " · ".join(f"{name} {seconds(times[f'{name}_s'])}" for name in ("queued", "starting", "running")),
            "exit": None if answer["exit_code"] is None else str(answer["exit_code"]),
            "attempts": str(len(answer["attempts"])) if len(answer["attempts"]) > 1 else None,
        }
    )
    if held:
        lines += [
            "",
            *table(
                ("RANK", "NODE", "GPU", "MODEL", "UUID"),
                [(str(gpu["rank"]), gpu["node"], str(gpu["index"]), gpu["model"], gpu["uuid"]) for gpu in held],
            ),
        ]
    return lines


def nodes(rows: Iterable[Answer]) -> list[str]:
    return table(
        ("NODE", "STATE", "FREE", "GPUS", "MODELS", "HEARTBEAT", "NOTE"),
        [
            (
                node["name"],
                node["state"],
                str(node["gpus_free"]),
                str(node["gpus_total"]),
                ", ".join(node["models"]) or NOTHING,
                ago(node["last_heartbeat_at"]),
                node_note(node),
            )
            for node in rows
        ],
    )


def gpus(rows: Iterable[Answer]) -> list[str]:
    return table(
        ("NODE", "GPU", "MODEL", "STATE", "UTIL", "MEMORY", "POWER", "TEMP", "HELD BY"),
        [
            (
                gpu["node"],
                str(gpu["index"]),
                gpu["model"],
                gpu["state"] if gpu["state"] != "ok" else "free" if gpu["free"] else "used",
                unit(gpu["latest"]["utilization_percent"], "%"),
                memory(gpu),
                unit(gpu["latest"]["power_mw"], " W", 1000),
                unit(gpu["latest"]["temperature_c"], " °C"),
                holder(gpu["holder"]),
            )
            for gpu in rows
        ],
    )


def rank_line(rank: int | str, text: str) -> str:
    mark = f"r{rank}" if isinstance(rank, int) else "··"
    colour = RANK_COLOURS[rank % len(RANK_COLOURS)] if isinstance(rank, int) else "bright_black"
    return f"{click.style(f'{mark:>3} │', fg=colour)} {shown(text)}"


def change(answer: Answer) -> str:
    why = reason(answer)
    return f"#{answer['id']} {state(answer['state'])}{f': {why}' if why else ''}"


# --- parts ------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    clean = [[shown(cell) or NOTHING for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(head), *clean]) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [list(head), *clean]]
    return ["  ".join(state(cell) for cell in line).rstrip() for line in lines]


def facts(values: dict[str, str | None]) -> list[str]:
    return [f"  {name:<10}{shown(value)}" for name, value in values.items() if value]


def state(text: str) -> str:
    colour = STATE_COLOURS.get(text.strip())
    return click.style(text, fg=colour) if colour else text


def reason(answer: Answer) -> str:
    return shown((answer["reason"] or {}).get("message") or "")


def node_note(node: Answer) -> str:
    notes = [
        node["problem"],
        node["cordon_reason"] if not node["schedulable"] else None,
        "simulated" if node["simulated"] else None,
    ]
    return "; ".join(note for note in notes if note)


def holder(held: Answer | None) -> str:
    if held is None:
        return NOTHING
    return f"{held['owner']} #{held['job']}" if held["job"] is not None else held["owner"]


def memory(gpu: Answer) -> str:
    used, total = gpu["latest"]["memory_used_bytes"], gpu["memory_total_bytes"]
    return "n/a" if used is None or total is None else f"{used / 1e9:.1f}/{total / 1e9:.1f} GB"


def unit(value: float | None, sign: str, divisor: float = 1) -> str:
    return "n/a" if value is None else f"{value / divisor:.0f}{sign}"


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def ago(at: str | None, now: datetime | None = None) -> str:
    if at is None:
        return NOTHING
    then = datetime.fromisoformat(at)
    age_s = max(0.0, ((now or datetime.now(UTC)) - then).total_seconds())
    for size_s, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= size_s:
            return f"{age_s / size_s:.0f} {name} ago"
    return f"{age_s:.0f} s ago"


def shown(text: str) -> str:
    """A job's name or output must not steer the terminal: control and direction characters are dropped."""
    return "".join(character for character in text if character == "\t" or character.isprintable())
