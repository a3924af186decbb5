"""States that both planes speak of, and the moves between them that are legal."""

from enum import StrEnum


class AttemptState(StrEnum):
    """One try of a job on fixed GPUs."""

    PENDING = "pending"  # GPUs are allocated and the order is in the desired state; no node has answered
    STARTING = "starting"  # a node accepted the order and is spawning the processes
    RUNNING = "running"  # the first process of the job exists
    STOPPING = "stopping"  # a stop was ordered; processes may still live
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # ended because somebody asked for it
    LOST = "lost"  # no exit record, and proof that nothing of it lives


class NodeState(StrEnum):
    """What the portal knows of a node's contact; whether work may be placed there is a flag of its own."""

    JOINING = "joining"  # enrolled, never heard of
    READY = "ready"
    SUSPECT = "suspect"  # silent for a few heartbeats
    UNREACHABLE = "unreachable"  # silent for long enough to get no new work; its jobs are left alone


class GpuState(StrEnum):
    """Health of one GPU. Whether it is free is never stored: it follows from the allocations."""

    OK = "ok"
    DIRTY = "dirty"  # memory or a process is left that no allocation explains
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    LOST = "lost"  # the driver no longer answers for it


_A = AttemptState
ATTEMPT_MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    _A.PENDING: frozenset({_A.STARTING, _A.RUNNING, _A.STOPPING, _A.SUCCEEDED, _A.FAILED, _A.STOPPED, _A.LOST}),
    _A.STARTING: frozenset({_A.RUNNING, _A.STOPPING, _A.SUCCEEDED, _A.FAILED, _A.STOPPED, _A.LOST}),
    _A.RUNNING: frozenset({_A.STOPPING, _A.SUCCEEDED, _A.FAILED, _A.STOPPED, _A.LOST}),
    # A run that ended by itself before the stop reached it keeps its true result.
    _A.STOPPING: frozenset({_A.SUCCEEDED, _A.FAILED, _A.STOPPED, _A.LOST}),
    _A.SUCCEEDED: frozenset(),
    _A.FAILED: frozenset(),
    _A.STOPPED: frozenset(),
    _A.LOST: frozenset(),
}

_N = NodeState
NODE_MOVES: dict[NodeState, frozenset[NodeState]] = {
    _N.JOINING: frozenset({_N.READY, _N.UNREACHABLE}),
    _N.READY: frozenset({_N.SUSPECT, _N.UNREACHABLE}),
    _N.SUSPECT: frozenset({_N.READY, _N.UNREACHABLE}),
    _N.UNREACHABLE: frozenset({_N.READY}),
}

ATTEMPT_ENDED = frozenset(state for state, moves in ATTEMPT_MOVES.items() if not moves)
ATTEMPT_ACTIVE = frozenset(ATTEMPT_MOVES) - ATTEMPT_ENDED


class EndReason(StrEnum):
    """Why an attempt ended, as far as its node can tell. The sentence for people is built by the portal."""

    EXITED = "exited"  # every process ended with status 0
    EXIT_CODE = "exit_code"  # a process ended with another status
    SIGNAL = "signal"  # a process was ended by a signal that the portal did not send
    LAUNCH_FAILED = "launch_failed"  # the command could not be started
    STOP_REQUESTED = "stop_requested"
    TIME_LIMIT = "time_limit"
    OUT_OF_MEMORY = "out_of_memory"  # the kernel ended it (memory.events), not guessed from 137
    SUPERVISOR_LOST = "supervisor_lost"  # the shim died; its tree was ended and verified empty
    NODE_REBOOT = "node_reboot"  # the boot id changed
    PREFLIGHT = "preflight"  # a check of the GPUs or the disk failed before anything was started
    UNKNOWN_EPOCH = "unknown_epoch"  # the node has already seen a newer attempt of this job


END_STATE: dict[EndReason, AttemptState] = {
    EndReason.EXITED: _A.SUCCEEDED,
    EndReason.EXIT_CODE: _A.FAILED,
    EndReason.SIGNAL: _A.FAILED,
    EndReason.LAUNCH_FAILED: _A.FAILED,
    EndReason.STOP_REQUESTED: _A.STOPPED,
    EndReason.TIME_LIMIT: _A.FAILED,
    EndReason.OUT_OF_MEMORY: _A.FAILED,
    EndReason.SUPERVISOR_LOST: _A.LOST,
    EndReason.NODE_REBOOT: _A.LOST,
    EndReason.PREFLIGHT: _A.FAILED,
    EndReason.UNKNOWN_EPOCH: _A.FAILED,
}
