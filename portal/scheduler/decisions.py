"""What a cycle decides. Applying it is somebody else's work."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One node's part. `gpus` are UUIDs in the order of the local ranks."""

    node: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    job: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Hold:
    """`code`: wait_gpus, wait_behind, wait_node, wait_retry, never_fits."""

    job: int
    code: str
    message: str


Decision = Start | Hold
