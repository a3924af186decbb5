"""The database: the only truth of the control plane."""

from portal.models.accounts import ApiToken, Membership, Project, User
from portal.models.events import Event
from portal.models.hardware import HardwareOrder, Health
from portal.models.jobs import (
    JOB_ACTIVE,
    JOB_ENDED,
    JOB_MOVES,
    Allocation,
    Attempt,
    IdempotencyKey,
    Job,
    JobState,
    Share,
)
from portal.models.logs import LogStream
from portal.models.nodes import Gpu, Node
from portal.models.samples import Rollup, SampleBlock

__all__ = [
    "JOB_ACTIVE",
    "JOB_ENDED",
    "JOB_MOVES",
    "Allocation",
    "ApiToken",
    "Attempt",
    "Event",
    "Gpu",
    "HardwareOrder",
    "Health",
    "IdempotencyKey",
    "Job",
    "JobState",
    "LogStream",
    "Membership",
    "Node",
    "Project",
    "Rollup",
    "SampleBlock",
    "Share",
    "User",
]
