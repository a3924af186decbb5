"""MIG on the simulated driver, through the real binding, against geometries that were enumerated elsewhere."""

import ctypes
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from workers.gpus import simulated
from workers.gpus.arguments import IN_USE, INSUFFICIENT_RESOURCES, INVALID_ARGUMENT, NOT_SUPPORTED, Refusal
from workers.gpus.boards import CATALOGUE
from workers.gpus.holders import Holder
from workers.gpus.machine import Machine
from workers.gpus.partitions import Partition
from workers.gpus.procfs import Stat

ORACLE = json.loads((Path(__file__).parent / "oracles" / "hardware.json").read_bytes())["geometries"]
NODES = {
    CATALOGUE.boards[topology.board].mig: name
    for name, topology in sorted(CATALOGUE.topologies.items())
    if CATALOGUE.boards[topology.board].mig and not topology.mig
}
"""A node with a board of each table."""

Place = tuple[int, int]  # profile id, start
Layout = frozenset[Place]


class Bench:
    """One board of a node, asked as any program would."""

    def __init__(self, topology: str, state: Path | None = None) -> None:
        self.holders, self.now = list[Holder](), 100.0
        self.machine = Machine(CATALOGUE.topologies[topology], "bench", clock=lambda: self.now,
                               scan=lambda _uuids: self.holders, state=state)
        simulated.install(topology, "bench", machine=self.machine, script="")
        pynvml.nvmlInit()
        self.gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def hold(self, *uuids: str, pid: int = 4242) -> None:
        self.holders = [Holder(pid, uuids, Stat(1, 5, 0, 1 << 30))] if uuids else []
        self.now += 1.0

    def create(self, profile: str, start: int | None = None) -> Any:
        profile_id = next(one[1] for one in ORACLE[self.table]["profiles"] if one[0] == profile)
        if start is None:
            return pynvml.nvmlDeviceCreateGpuInstance(self.gpu, profile_id)
        placement = pynvml.c_nvmlGpuInstancePlacement_t(start, 0)
        return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(self.gpu, profile_id, ctypes.byref(placement))

    def compute(self, instance: Any, profile: int | None = None) -> Any:
        whole = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
        if profile is None:
            info = pynvml.nvmlGpuInstanceGetInfo(instance)
            slices = pynvml.nvmlDeviceGetGpuInstanceProfileInfoById(self.gpu, info.profileId).sliceCount
            profile = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, whole[slices], 0).id
        return pynvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)

    @property
    def table(self) -> str:
        return self.machine.gpus[0].board.mig or ""

    def slices(self) -> list[Any]:
        found = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(self.gpu)):
            try:
                found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self.gpu, index))
            except pynvml.NVMLError_NotFound:
                continue
        return found


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    yield Bench
    simulated.uninstall()


def refusal(call: Callable[..., object], *arguments: object) -> int:
    with pytest.raises(pynvml.NVMLError) as error:
        call(*arguments)
    return int(error.value.value)


# --- every geometry of every table ---------------------------------------------------------------------------------


def partition_of(table: str, layout: Layout = frozenset()) -> Partition:
    partition = Partition(CATALOGUE.mig_tables[table])
    partition.set_mode(True, busy=False)
    for profile, start in sorted(layout):
        partition.create(profile, start)
    return partition


def places(table: str) -> list[Place]:
    return [(identity, start) for _, identity, _, _, starts in ORACLE[table]["profiles"] for start in starts]


def layouts_by_creating(table: str) -> set[Layout]:
    """Everything that can be reached, in whatever order, by creating one instance after the other."""
    found, edge = {frozenset[Place]()}, [frozenset[Place]()]
    while edge:
        layout = edge.pop()
        for place in places(table):
            after = layout | {place}
            if after not in found and place not in layout and accepts(table, layout, place):
                found.add(after)
                edge.append(after)
    return found


def accepts(table: str, layout: Layout, place: Place) -> bool:
    partition = partition_of(table, layout)
    try:
        partition.create(*place)
    except Refusal as refused:
        assert refused.code == INSUFFICIENT_RESOURCES
        assert {(one.profile.id, one.start) for one in partition.instances.values()} == layout
        return False
    return True


@pytest.mark.parametrize("table", sorted(CATALOGUE.mig_tables))
def test_the_layouts_that_can_be_created_are_those_of_the_table_and_no_others(table: str) -> None:
    found = layouts_by_creating(table) - {frozenset()}
    multisets = {frozenset(Counter(profile for profile, _ in layout).items()) for layout in found}
    assert (len(multisets), len(found)) == (ORACLE[table]["multisets"], ORACLE[table]["placements"])


@pytest.mark.parametrize("table", sorted(CATALOGUE.mig_tables))
def test_every_largest_layout_is_created_by_the_binding_and_takes_nothing_more(
    bench: Callable[..., Bench], table: str
) -> None:
    desk = bench(NODES[table])
    memory = {name: mib for name, _, mib, _, _ in ORACLE[table]["profiles"]}
    assert pynvml.nvmlDeviceSetMigMode(desk.gpu, 1) == pynvml.NVML_SUCCESS
    for layout in ORACLE[table]["maximal"] + ORACLE[table]["stuck"]:
        words = [word.split("@") for word in layout.split()]
        made = [desk.create(name, int(place.split(":")[0])) for name, place in words]
        computes = [desk.compute(one) for one in made]
        found = desk.slices()
        names = [pynvml.nvmlDeviceGetName(one).rpartition(" MIG ")[2] for one in found]
        assert sorted(names) == sorted(name for name, _ in words)
        assert [pynvml.nvmlDeviceGetMemoryInfo(one).total >> 20 for one in found] == [memory[name] for name in names]
        assert len({pynvml.nvmlDeviceGetUUID(one) for one in found}) == len(words)
        for name, identity, *_ in ORACLE[table]["profiles"]:
            assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(desk.gpu, identity) == 0
            assert refusal(desk.create, name) == INSUFFICIENT_RESOURCES
        for compute in computes:
            pynvml.nvmlComputeInstanceDestroy(compute)
        for one in made:
            pynvml.nvmlGpuInstanceDestroy(one)
    assert desk.slices() == []
    assert pynvml.nvmlDeviceSetMigMode(desk.gpu, 0) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(desk.gpu) == 0


@pytest.mark.parametrize("table", sorted(CATALOGUE.mig_tables))
def test_the_driver_offers_the_profiles_and_placements_of_the_table(bench: Callable[..., Bench], table: str) -> None:
    desk = bench(NODES[table])
    offered = {}
    for constant in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(desk.gpu, constant)
        except pynvml.NVMLError_NotSupported:
            continue
        count = ctypes.c_uint()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(desk.gpu, info.id, None, ctypes.byref(count))
        room = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(desk.gpu, info.id, room, ctypes.byref(count))
        name = info.name.decode() if isinstance(info.name, bytes) else info.name
        offered[name] = [info.id, info.memorySizeMB, room[0].size, [one.start for one in room]]
    assert offered == {f"MIG {name}": rest for name, *rest in ORACLE[table]["profiles"]}
    assert refusal(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, desk.gpu, 18) == INVALID_ARGUMENT


# --- the life of slices --------------------------------------------------------------------------------------------


def test_the_mode_waits_for_the_processes_of_the_board(bench: Callable[..., Bench]) -> None:
    desk = bench("DGX-A100-8")
    desk.hold(pynvml.nvmlDeviceGetUUID(desk.gpu))
    assert pynvml.nvmlDeviceSetMigMode(desk.gpu, 1) == IN_USE
    assert pynvml.nvmlDeviceGetMigMode(desk.gpu) == [0, 1]
    desk.hold()
    assert pynvml.nvmlDeviceSetMigMode(desk.gpu, 1) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(desk.gpu) == [1, 1]


def test_a_board_without_mig_supports_none_of_it(bench: Callable[..., Bench]) -> None:
    desk = bench("RTX4090-8-PCIe")
    assert refusal(pynvml.nvmlDeviceGetMigMode, desk.gpu) == NOT_SUPPORTED
    assert refusal(pynvml.nvmlDeviceSetMigMode, desk.gpu, 1) == NOT_SUPPORTED
    assert refusal(pynvml.nvmlDeviceCreateGpuInstance, desk.gpu, 19) == NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(desk.gpu) == 0


def test_what_is_illegal_is_refused_with_the_code_of_a_driver(bench: Callable[..., Bench]) -> None:
    desk = bench("DGX-H100-8")
    assert refusal(desk.create, "1g.10gb", 0) == NOT_SUPPORTED  # MIG is off
    pynvml.nvmlDeviceSetMigMode(desk.gpu, 1)
    assert refusal(desk.create, "2g.20gb", 1) == INVALID_ARGUMENT  # no such start
    assert refusal(pynvml.nvmlDeviceCreateGpuInstance, desk.gpu, 77) == INVALID_ARGUMENT
    three = desk.create("3g.40gb", 4)
    assert refusal(desk.create, "1g.10gb", 4) == INSUFFICIENT_RESOURCES  # taken
    assert refusal(desk.create, "7g.80gb") == INSUFFICIENT_RESOURCES
    desk.create("1g.10gb+me", 0)
    assert refusal(desk.create, "1g.10gb+me", 1) == INSUFFICIENT_RESOURCES  # one set of media engines
    assert refusal(desk.compute, three, 3) == NOT_SUPPORTED  # 4c in a 3g
    desk.compute(three)
    assert refusal(desk.compute, three, 0) == INSUFFICIENT_RESOURCES
    assert refusal(pynvml.nvmlGpuInstanceDestroy, three) == IN_USE


def test_the_driver_puts_halves_to_the_right_first_and_numbers_by_place(bench: Callable[..., Bench]) -> None:
    desk = bench("DGX-A100-8")
    pynvml.nvmlDeviceSetMigMode(desk.gpu, 1)
    infos = [pynvml.nvmlGpuInstanceGetInfo(desk.create(name)) for name in ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")]
    assert [(info.id, info.placement.start, info.placement.size) for info in infos] == [
        (1, 4, 4), (3, 0, 2), (9, 2, 1), (10, 3, 1)]
    again = pynvml.nvmlDeviceGetGpuInstanceById(desk.gpu, 9)
    assert pynvml.nvmlGpuInstanceGetInfo(again).placement.start == 2


def test_a_gpu_instance_is_shared_by_compute_instances(bench: Callable[..., Bench]) -> None:
    desk = bench("DGX-A100-8")
    pynvml.nvmlDeviceSetMigMode(desk.gpu, 1)
    three = desk.create("3g.40gb", 4)
    assert desk.slices() == []  # without a compute instance it is no device
    parts = [desk.compute(three, 1), desk.compute(three, 0)]
    one, two = desk.slices()
    assert [pynvml.nvmlDeviceGetName(piece).rpartition(" MIG ")[2] for piece in (one, two)] == [
        "2c.3g.40gb", "1c.3g.40gb"]
    attributes = pynvml.nvmlDeviceGetAttributes(one)
    assert (attributes.multiprocessorCount, attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount,
            attributes.memorySizeMB) == (28, 3, 2, 40192)
    assert [pynvml.nvmlDeviceGetComputeInstanceId(piece) for piece in (one, two)] == [0, 1]
    assert pynvml.nvmlComputeInstanceGetInfo(parts[1]).placement.start == 2
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(two)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(desk.gpu)
    assert bool(pynvml.nvmlDeviceIsMigDeviceHandle(two).value)
    assert not bool(pynvml.nvmlDeviceIsMigDeviceHandle(desk.gpu).value)


def test_processes_stand_on_their_slice_and_on_the_board_with_both_ids(bench: Callable[..., Bench]) -> None:
    desk = bench("A100-2-MIG")
    desk.gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
    half, quarter, eighth = desk.slices()
    desk.hold(pynvml.nvmlDeviceGetUUID(quarter))
    assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(quarter)] == [4242]
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(half) == []
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(desk.gpu)
    assert [(one.pid, one.gpuInstanceId, one.computeInstanceId) for one in listed] == [(4242, 5, 0)]
    used = pynvml.nvmlDeviceGetMemoryInfo(quarter, version=pynvml.nvmlMemory_v2).used
    assert used == pynvml.nvmlDeviceGetMemoryInfo(desk.gpu, version=pynvml.nvmlMemory_v2).used > 1 << 30
    assert pynvml.nvmlDeviceGetMemoryInfo(eighth, version=pynvml.nvmlMemory_v2).used == 0
    compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(pynvml.nvmlDeviceGetGpuInstanceById(desk.gpu, 5), 0)
    assert refusal(pynvml.nvmlComputeInstanceDestroy, compute) == IN_USE
    desk.hold()
    pynvml.nvmlComputeInstanceDestroy(compute)
    assert refusal(pynvml.nvmlDeviceGetUUID, quarter) == INVALID_ARGUMENT  # the handle of what is gone
    assert len(desk.slices()) == 2


def test_what_cannot_be_told_of_slices_is_not_supported(bench: Callable[..., Bench]) -> None:
    desk = bench("A100-2-MIG")
    desk.gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
    for handle in (desk.gpu, desk.slices()[0]):
        for call in (pynvml.nvmlDeviceGetUtilizationRates, pynvml.nvmlDeviceGetEncoderUtilization,
                     pynvml.nvmlDeviceGetDecoderUtilization):
            assert refusal(call, handle) == NOT_SUPPORTED
        assert refusal(pynvml.nvmlDeviceGetProcessUtilization, handle, 0) == NOT_SUPPORTED
    assert refusal(pynvml.nvmlDeviceGetPowerUsage, desk.slices()[0]) == NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetPowerUsage(desk.gpu) > 0


def test_a_slice_that_is_gone_leaves_a_hole_that_the_next_one_fills(bench: Callable[..., Bench]) -> None:
    desk = bench("DGX-H100-8")
    pynvml.nvmlDeviceSetMigMode(desk.gpu, 1)
    computes = [desk.compute(desk.create("1g.10gb", start)) for start in range(3)]
    pynvml.nvmlComputeInstanceDestroy(computes[1])
    assert refusal(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, desk.gpu, 1) == pynvml.NVML_ERROR_NOT_FOUND
    last = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(desk.gpu, 2))
    desk.compute(desk.create("3g.40gb", 4))
    names = [pynvml.nvmlDeviceGetName(piece).rpartition(" MIG ")[2] for piece in desk.slices()]
    assert names == ["1g.10gb", "3g.40gb", "1g.10gb"]
    assert pynvml.nvmlDeviceGetUUID(desk.slices()[2]) == last


def test_a_slice_is_found_by_both_forms_of_its_name(bench: Callable[..., Bench]) -> None:
    desk = bench("A100-2-MIG")
    desk.gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
    piece = desk.slices()[0]
    uuid, parent = pynvml.nvmlDeviceGetUUID(piece), pynvml.nvmlDeviceGetUUID(desk.gpu)
    instance, compute = pynvml.nvmlDeviceGetGpuInstanceId(piece), pynvml.nvmlDeviceGetComputeInstanceId(piece)
    for name in (uuid, f"MIG-{parent}/{instance}/{compute}"):
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(name)) == uuid
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(parent)) == parent
    assert refusal(pynvml.nvmlDeviceGetHandleByUUID, "MIG-none") == pynvml.NVML_ERROR_NOT_FOUND


def test_slices_survive_the_process_that_made_them(bench: Callable[..., Bench], tmp_path: Path) -> None:
    state = tmp_path / "simulated.json"
    desk = bench("DGX-H100-8", state)
    pynvml.nvmlDeviceSetMigMode(desk.gpu, 1)
    desk.compute(desk.create("3g.40gb", 4), 1)
    desk.compute(desk.create("1g.10gb", 2))
    before = [pynvml.nvmlDeviceGetUUID(piece) for piece in desk.slices()]
    again = bench("DGX-H100-8", state)
    assert [pynvml.nvmlDeviceGetUUID(piece) for piece in again.slices()] == before
    assert [piece.profile for piece in again.machine.gpus[0].slices] == ["2c.3g.40gb", "1g.10gb"]
    other = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert pynvml.nvmlDeviceGetMigMode(other) == [0, 0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"GPU-x": {}}', b'{"GPU-x": {"cuts": [{"profile": "no"}]}}'])
def test_a_state_that_cannot_be_read_leaves_the_node_as_delivered(
    bench: Callable[..., Bench], tmp_path: Path, content: bytes
) -> None:
    state = tmp_path / "simulated.json"
    state.write_bytes(content)
    desk = bench("A100-2-MIG", state)
    desk.gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert len(desk.slices()) == 3
