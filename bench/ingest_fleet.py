"""What `bench.ingest` needs of the portal: `make` fills its database with a busy fleet, `roll-up` rolls it up."""

import json
import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")
django.setup()

from portal.models import Allocation, Attempt, Gpu, Job, Node  # noqa: E402
from portal.services import accounts, history, raw  # noqa: E402
from wire.reports import GpuReading  # noqa: E402
from wire.signing import new_private_key, public_key_of  # noqa: E402


def main() -> int:
    match sys.argv[1:]:
        case ["make", home, nodes, gpus]:
            fleet = make(int(nodes), int(gpus))
            (Path(home) / "fleet.json").write_text(json.dumps(fleet))
        case ["roll-up", nodes]:
            print(json.dumps({"cpu_percent": roll_up(int(nodes))}))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def make(nodes: int, gpus: int) -> list[dict[str, Any]]:
    """Every GPU is held: a job per node."""
    owner = accounts.create_user("bench", uuid.uuid4().hex)
    return [make_node(owner, f"node-{number:04d}", gpus) for number in range(nodes)]


def make_node(owner: Any, name: str, gpus: int) -> dict[str, Any]:
    key = new_private_key()
    node = Node.objects.create(
        name=name, state="ready", public_key=public_key_of(key), broker_password_sha256="0" * 64, boot_id="bench"
    )
    rows = Gpu.objects.bulk_create(
        Gpu(node=node, uuid=f"GPU-{uuid.uuid4()}", index=index, vendor="nvidia", name="NVIDIA H100 80GB HBM3",
            model="H100", memory_total_bytes=80 << 30)
        for index in range(gpus)
    )  # fmt: skip
    job = Job.objects.create(
        owner=owner, project=owner.personal_project, name=name, spec={}, gpu_count=gpus, state="running"
    )
    attempt = Attempt.objects.create(job=job, number=1, state="running")
    Allocation.objects.bulk_create(Allocation(gpu=gpu, attempt=attempt, rank=gpu.index) for gpu in rows)
    return {"name": name, "key": key.hex(), "gpus": [gpu.uuid for gpu in rows], "attempt": str(attempt.pk)}


def roll_up(nodes: int) -> float:
    """-> percent of a core that rolling up takes for so many nodes, measured with some of them over ten minutes."""
    some = list(Node.objects.order_by("pk")[: min(nodes, 20)])
    begin = (int(time.time()) - 7200) // 1800 * 1800
    for start in (begin, begin + 300):  # the second one finds the rows of the first, as in ordinary life
        for node in some:
            feed(node, start)
        history.keep_house(now=start - 3600.0)  # partitions
        before = time.process_time()
        while history.roll_up(now=start + 1300.0):
            pass
        used_s = time.process_time() - before
    return round(100 * used_s / 300 * nodes / len(some), 1)


def feed(node: Node, start: int) -> None:
    uuids = list(node.gpus.values_list("uuid", flat=True))
    for at in range(start, start + 300, 4):
        readings = [reading(uuid, float(at + step)) for step in range(4) for uuid in uuids]
        raw.append(node, readings, now=at + 4.0)


def reading(uuid: str, at: float) -> GpuReading:
    use = random.randint(80, 100)
    return GpuReading(
        uuid=uuid, at=at, utilization_percent=use, memory_used_bytes=(60 << 30) + use, power_mw=6500 * use,
        temperature_c=60 + use % 7, sm_clock_mhz=1980, memory_temperature_c=70, energy_mj=int(at * 650_000),
        pcie_received_bytes_per_s=1e9 + use, pcie_transmitted_bytes_per_s=2e9 + use,
        nvlink_received_bytes_per_s=1e11 + use, nvlink_transmitted_bytes_per_s=1e11 + use,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
