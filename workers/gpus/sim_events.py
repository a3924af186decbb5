"""Symbols of the simulated library: sets of events. What happened before anybody listened waits for who does."""

import itertools
import time
from typing import Any

import pynvml

from workers.gpus.arguments import INVALID_ARGUMENT, Refusal, address, behind, fill, plain, point, point_member, put
from workers.gpus.sim_handles import Handles, Symbol
from workers.gpus.sim_scenario import (
    EVENT_DOUBLE_BIT_ECC,
    EVENT_RECOVERY_ACTION,
    EVENT_XID,
    Event,
    Scenario,
)

FIRST_SET = 0x900000
STEP_S = 0.01
NOT_IN_MIG = 0xFFFFFFFF
SUPPORTED = EVENT_XID | EVENT_RECOVERY_ACTION


def symbols(handles: Handles, scenario: Scenario) -> dict[str, Symbol]:
    sets: dict[int, dict[int, int]] = {}  # set -> GPU index -> kinds
    numbers = itertools.count(FIRST_SET, 16)

    def registered(handle: Any) -> dict[int, int]:
        if (address(handle) or 0) not in sets:
            raise Refusal(INVALID_ARGUMENT)
        return sets[address(handle) or 0]

    def create(out: Any) -> None:
        number = next(numbers)
        sets[number] = {}
        point(out, number)

    def supported(handle: Any, out: Any) -> None:
        put(out, SUPPORTED | (EVENT_DOUBLE_BIT_ECC if handles.gpu(handle).board.has_ecc else 0))

    def register(handle: Any, kinds: Any, event_set: Any) -> None:
        registered(event_set)[handles.gpu(handle).index] = plain(kinds)

    def wait(event_set: Any, out: Any, timeout_ms: Any) -> None:
        kinds = registered(event_set)
        event = wait_for(scenario, kinds, plain(timeout_ms) / 1000)
        struct = behind(out)
        fill(struct, eventType=event.kind, eventData=event.data, gpuInstanceId=NOT_IN_MIG,
             computeInstanceId=NOT_IN_MIG)
        point_member(struct, "device", handles.of(handles.machine.gpus[event.gpu]))

    return {
        "nvmlEventSetCreate": create,
        "nvmlDeviceGetSupportedEventTypes": supported,
        "nvmlDeviceRegisterEvents": register,
        "nvmlEventSetWait_v2": wait,
        "nvmlEventSetFree": lambda event_set: sets.pop(address(event_set) or 0, None) and None,
    }


def wait_for(scenario: Scenario, kinds: dict[int, int], seconds: float) -> Event:
    end = time.monotonic() + seconds
    while True:
        scenario.advance()
        for event in scenario.events:
            if kinds.get(event.gpu, 0) & event.kind:
                scenario.events.remove(event)
                return event
        left = end - time.monotonic()
        if left <= 0:
            raise Refusal(pynvml.NVML_ERROR_TIMEOUT)
        time.sleep(min(STEP_S, left))
