"""Xid errors: what each number of the NVIDIA driver means, who caused it, what is to be done. The table is a file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.states import GpuState

TABLE = Path(__file__).with_name("xids.json")


@dataclass(frozen=True, slots=True)
class Xid:
    code: int
    meaning: str
    action: str  # a key of the table's advice
    advice: str
    severity: str  # info | warning | critical
    scope: str  # app | gpu | node
    cause: str  # app | driver | hardware
    state: GpuState | None = None  # what the GPU becomes; None: it goes on

    @property
    def app_caused(self) -> bool:
        return self.cause == "app"


def lookup(code: int | None) -> Xid:
    """Also for a number that the table does not know: shown, never guessed at."""
    return KNOWN.get(code or 0) or Xid(code or 0, "An error that is not in the table of this version.", "support",
                                       ADVICE["support"], "warning", "gpu", "driver")


def read_table(table: dict[str, Any]) -> dict[int, Xid]:
    advice = table["actions"]
    rows = {row["code"]: xid_of(row, advice[row["action"]]) for row in table["codes"]}
    return {code: unused(code, advice["support"]) for code in table["unused"]} | rows


def unused(code: int, advice: str) -> Xid:
    return Xid(code, "A number that the driver no longer uses.", "support", advice, "info", "gpu", "driver")


def xid_of(row: dict[str, Any], advice: str) -> Xid:
    state = GpuState(row["state"]) if row["state"] else None
    return Xid(row["code"], row["meaning"], row["action"], advice, row["severity"], row["scope"], row["cause"], state)


CONTENT: dict[str, Any] = json.loads(TABLE.read_text())
ADVICE: dict[str, str] = CONTENT["actions"]
KNOWN = read_table(CONTENT)
