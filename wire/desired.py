"""Downward: what a node is to do. A snapshot, read on every hint and every few seconds; losing one costs seconds.

Absence from the snapshot means nothing. Only an explicit `Stop` ends a run, only an explicit `forget` deletes a spool.
"""

import msgspec

from wire.hardware import Order


class GpuSlot(msgspec.Struct, frozen=True):
    """A GPU given to one local rank. `uuid` is the identity; the index is a label."""

    uuid: str
    index: int
    vendor: str = "nvidia"  # as in GpuInfo: it decides by which variable a job is told
    trusted_since: float = 0.0  # the portal knows of what happened before, and found it in order


class Launch(msgspec.Struct, kw_only=True):
    """One node's share of one attempt. Its ranks are `first_rank … first_rank + len(gpus) - 1`, at least one."""

    attempt: str  # UUID, also the name of the spool directory
    job: int
    epoch: int  # number of the attempt within its job; only grows
    name: str
    user: str
    launcher: str  # script | torchrun | …
    command: str  # words as a POSIX shell would split them; no shell runs it
    env: dict[str, str] = {}
    runtime: str = "process"
    workdir: str | None = None  # absolute path on the node; None: a fresh directory in the spool
    gpus: list[GpuSlot] = []
    node_rank: int = 0
    node_count: int = 1
    first_rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int | None = None  # None on one node: the launcher takes a free one
    layout: dict[str, int] = {}  # data, tensor, pipeline
    time_limit_s: float | None = None
    stop_grace_s: float = 45.0  # torchrun itself needs 30 s between TERM and KILL
    log_cap_bytes: int = 512 * 1024 * 1024  # per rank


class Stop(msgspec.Struct, kw_only=True):
    attempt: str
    job: int
    epoch: int
    grace_s: float = 45.0


class Acknowledged(msgspec.Struct, kw_only=True):
    """What the portal's database durably has of one attempt."""

    event_seq: int = 0  # every event up to and with this one
    log_offsets: dict[str, int] = {}  # stream name (see reports.LogChunk) -> bytes


class Desired(msgspec.Struct, kw_only=True):
    """The whole order for one node.

    `serial` only grows per node; an older snapshot is refused. `echo` is the nonce of the node's newest heartbeat that
    the database has seen: a node that does not see its own nonce return for a minute knows that it is deaf.
    """

    node: str
    serial: int
    launches: list[Launch] = []
    stops: list[Stop] = []
    acknowledged: dict[str, Acknowledged] = {}  # attempt -> what is durable
    forget: list[str] = []  # ended attempts whose record is complete: the spool may go
    orders: list[Order] = []  # for the hardware; each is carried out once, by its id
    inventory_digest: str = ""  # of the inventory the database has; a node with another one reports anew
    echo: str = ""


class HintBody(msgspec.Struct):
    """Body of the Celery hint."""

    serial: int
