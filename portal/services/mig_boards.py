"""What a card can be cut into and how it is cut now, from the tables and from what its driver said."""

from typing import Any

from portal.hardware import boards
from portal.hardware.boards import Board, Profile
from portal.hardware.mig import Slice
from portal.models import Gpu
from portal.services.errors import Problem

MIB = 1024**2


def board_of(gpu: Gpu) -> Board:
    """Raises Problem 422 for what cannot be cut."""
    board = find_board(gpu)
    if board is None:
        place = f"GPU {gpu.index} of {gpu.node.name}"
        why = "is itself a slice; name the card it is cut from" if gpu.mig_profile else f"({gpu.name}) cannot be cut"
        detail = f"{place} {why}: MIG is for A30, A100, H100, H200, B200 and the like."
        raise Problem(422, "not_mig_capable", detail, errors=[{"field": "gpu", "message": f"{place} cannot be cut."}])
    return board


def find_board(gpu: Gpu) -> Board | None:
    """The tables first: a driver lists its profiles only while MIG is on, and not what they exclude."""
    if gpu.vendor != "nvidia" or gpu.mig_profile or gpu.details.get("mig_capable") is False:
        return None
    found = boards.find(gpu.name, gpu.memory_total_bytes)
    return found or as_told(gpu.name, told(gpu).get("profiles") or [])


def existing(gpu: Gpu) -> tuple[Slice, ...]:
    """The slices there are and where. Raises Problem 409 while there are some and their places are not known."""
    found = tuple(Slice(int(one["start"]), str(one["profile"])) for one in told(gpu).get("instances") or [])
    slices = Gpu.objects.present().filter(node=gpu.node_id, parent_uuid=gpu.uuid).count()
    if slices and not found:
        detail = f"{gpu.node.name} has not said yet where the slices of GPU {gpu.index} lie. Try again soon."
        raise Problem(409, "not_reported", detail, headers={"Retry-After": "30"})
    return tuple(sorted(found)) if gpu.mig_enabled else ()


def told(gpu: Gpu) -> dict[str, Any]:
    """The newest wire.hardware.MigStatus of it."""
    status = gpu.hardware.get("mig")
    return status if isinstance(status, dict) else {}


def as_told(name: str, rows: list[dict[str, Any]]) -> Board | None:
    """A board that no table has, as its driver describes it."""
    profiles = [
        Profile(
            str(row["name"]), int(row["slices"]), int(row["memory_bytes"]) // MIB, int(row["instances_max"]),
            int(row.get("size", 1)), tuple(row.get("placements") or ()),
        )
        for row in rows
    ]  # fmt: skip
    if not profiles:
        return None
    slots = max(start + profile.size for profile in profiles for start in profile.starts or (0,))
    slices = max(profile.slices * profile.most for profile in profiles)
    return Board(name, slices, slots, boards.in_order(profiles))
