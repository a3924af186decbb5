"""How one simulated GPU is cut into MIG slices: the rules of placement, without any ctypes.

A GPU instance takes memory slots from its start on and a number of compute slices; its id follows from its place.
A compute instance shares the memory of its GPU instance. Only both together are a device for jobs.
"""

from dataclasses import dataclass, field

import msgspec

from workers.gpus.arguments import IN_USE, INSUFFICIENT_RESOURCES, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Refusal
from workers.gpus.boards import MigProfile, MigTable

COMPUTE_PROFILES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}
"""Profile id of a compute instance -> its slices."""

COMPUTE_OF = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 3), 7: (0, 1, 2, 3, 4)}
"""Slices of a GPU instance -> the compute profiles that it offers; the last takes all of it."""

MEDIA = "+me"
"""The suffix of profiles with the media engines, of which a board has one set."""


@dataclass(slots=True)
class ComputeInstance:
    id: int
    profile: int
    start: int
    slices: int


@dataclass(slots=True)
class GpuInstance:
    id: int
    profile: MigProfile
    start: int
    computes: dict[int, ComputeInstance] = field(default_factory=dict)

    def slots(self) -> range:
        return range(self.start, self.start + self.profile.size)

    def name_of(self, compute: ComputeInstance) -> str:
        part = "" if compute.slices == self.profile.slices else f"{compute.slices}c."
        return part + self.profile.name

    def free_starts(self, slices: int) -> list[int]:
        taken = {slot for one in self.computes.values() for slot in range(one.start, one.start + one.slices)}
        most = self.profile.slices - slices
        return [start for start in range(0, most + 1, slices) if not taken & set(range(start, start + slices))]


class Cut(msgspec.Struct):
    """A GPU instance as it is kept: the profile by its id, its start, and (profile, start) of its compute instances."""

    profile: int
    start: int
    computes: list[tuple[int, int]]


class Layout(msgspec.Struct):
    enabled: bool = False
    pending: bool = False
    cuts: list[Cut] = []


class Partition:
    """One GPU. `table` is None on a board without MIG."""

    def __init__(self, table: MigTable | None) -> None:
        self.table = table
        self.enabled = self.pending = False
        self.instances: dict[int, GpuInstance] = {}

    # Mode.

    def modes(self) -> tuple[bool, bool]:
        self._table()
        return self.enabled, self.pending

    def set_mode(self, wanted: bool, *, busy: bool) -> bool:
        """False when it has to wait until the GPU is free: then only the pending mode has changed."""
        self._table()
        self.pending = wanted
        if wanted != self.enabled and (busy or self.instances):
            return False
        self.enabled = wanted
        return True

    # GPU instances.

    def profile(self, profile_id: int) -> MigProfile:
        for profile in self._table().profiles:
            if profile.id == profile_id:
                return profile
        raise Refusal(INVALID_ARGUMENT)

    def room_for(self, profile: MigProfile, start: int) -> bool:
        table, others = self._table(), self.instances.values()
        taken = {slot for one in others for slot in one.slots()}
        slices = sum(one.profile.slices for one in others)
        return (
            taken.isdisjoint(range(start, start + profile.size))
            and slices + profile.slices <= table.slices
            and sum(one.profile.id == profile.id for one in others) < profile.instances_max
            and not (profile.name.endswith(MEDIA) and any(one.profile.name.endswith(MEDIA) for one in others))
        )

    def create(self, profile_id: int, start: int | None = None) -> GpuInstance:
        profile = self.profile(profile_id)
        if not self.enabled:
            raise Refusal(NOT_SUPPORTED)
        if start is not None and start not in profile.starts:
            raise Refusal(INVALID_ARGUMENT)
        for place in preferred_starts(profile) if start is None else [start]:
            if self.room_for(profile, place):
                made = GpuInstance(self._id_at(profile, place), profile, place)
                self.instances[made.id] = made
                return made
        raise Refusal(INSUFFICIENT_RESOURCES)

    def remaining(self, profile_id: int) -> int:
        """How many more of a profile have room."""
        profile, trial = self.profile(profile_id), Partition(self.table)
        trial.enabled, trial.instances = self.enabled, dict(self.instances)
        before = len(trial.instances)
        for start in profile.starts:
            if trial.room_for(profile, start):
                trial.create(profile_id, start)
        return len(trial.instances) - before

    def destroy(self, instance_id: int) -> None:
        if self.instance(instance_id).computes:
            raise Refusal(IN_USE)
        del self.instances[instance_id]

    def instance(self, instance_id: int) -> GpuInstance:
        if instance_id not in self.instances:
            raise Refusal(NOT_FOUND)
        return self.instances[instance_id]

    # Compute instances.

    def compute(self, instance_id: int, compute_id: int) -> ComputeInstance:
        computes = self.instance(instance_id).computes
        if compute_id not in computes:
            raise Refusal(NOT_FOUND)
        return computes[compute_id]

    def create_compute(self, instance_id: int, profile: int, start: int | None = None) -> ComputeInstance:
        instance = self.instance(instance_id)
        slices = compute_slices(instance, profile)
        free = instance.free_starts(slices)
        if start is not None and start not in range(0, instance.profile.slices - slices + 1, slices):
            raise Refusal(INVALID_ARGUMENT)
        if not free or (start is not None and start not in free):
            raise Refusal(INSUFFICIENT_RESOURCES)
        number = next(number for number in range(len(instance.computes) + 1) if number not in instance.computes)
        made = ComputeInstance(number, profile, free[0] if start is None else start, slices)
        instance.computes[number] = made
        return made

    def destroy_compute(self, instance_id: int, compute_id: int) -> None:
        self.compute(instance_id, compute_id)
        del self.instance(instance_id).computes[compute_id]

    # What outlives the process.

    def layout(self) -> Layout:
        cuts = [Cut(one.profile.id, one.start, [(part.profile, part.start) for part in one.computes.values()])
                for one in self.instances.values()]
        return Layout(self.enabled, self.pending, cuts)

    def restore(self, layout: Layout) -> None:
        """Raises Refusal for a layout of another board."""
        self.instances = {}
        self.enabled = layout.enabled
        for cut in layout.cuts:
            made = self.create(cut.profile, cut.start)
            for profile, start in cut.computes:
                self.create_compute(made.id, profile, start)
        self.pending = layout.pending

    def cut(self, layout: list[str]) -> None:
        """From words such as `3g.40gb@4`, each with one compute instance that takes all of it."""
        self.enabled = self.pending = True
        for word in layout:
            name, _, start = word.partition("@")
            profile = next(one for one in self._table().profiles if one.name == name)
            made = self.create(profile.id, int(start))
            self.create_compute(made.id, COMPUTE_OF[profile.slices][-1])

    def _table(self) -> MigTable:
        if self.table is None:
            raise Refusal(NOT_SUPPORTED)
        return self.table

    def _id_at(self, profile: MigProfile, start: int) -> int:
        table = self._table()
        if profile.size == table.memory_slots:
            return 0
        if table.memory_slots == 4:
            return 1 + start // 2 if profile.size == 2 else 3 + start
        if profile.size == 4:
            return 1 if start == 4 else 2
        return 3 + start // 2 if profile.size == 2 else 7 + start


def preferred_starts(profile: MigProfile) -> list[int]:
    """The driver fills from the left, except that the half of a board goes to the right first."""
    return sorted(profile.starts, reverse=profile.size == 4)


def compute_slices(instance: GpuInstance, profile: int) -> int:
    if profile not in COMPUTE_PROFILES:
        raise Refusal(INVALID_ARGUMENT)
    if profile not in COMPUTE_OF[instance.profile.slices]:
        raise Refusal(NOT_SUPPORTED)
    return COMPUTE_PROFILES[profile]
