"""What this machine is, for the portal."""

import hashlib
import os
import socket
from importlib import metadata
from pathlib import Path

import msgspec

from wire.reports import Inventory
from workers.gpus import GpuList
from workers.gpus.procfs import memory_total_bytes

NO_ANSWER = "The GPU reader has not answered yet."


def build(gpus: GpuList | None, *, simulated: bool = False) -> Inventory:
    """`gpus` is the reader's newest enumeration, None if there is none yet."""
    listed = gpus or GpuList(problem=NO_ANSWER)
    inventory = Inventory(
        digest="",
        boot_id=boot_id(),
        hostname=socket.gethostname(),
        agent_version=agent_version(),
        driver=listed.driver,
        cuda=listed.cuda,
        gpus=sorted(listed.infos, key=lambda info: (info.index, info.uuid)),
        links=sorted(listed.links, key=lambda link: (link.a, link.b)),
        nvswitch=listed.nvswitch,
        cpu_count=os.cpu_count(),
        memory_total_bytes=memory_total_bytes(),
        problem=listed.problem,
        simulated=simulated,
    )
    inventory.digest = digest_of(inventory)
    return inventory


def digest_of(inventory: Inventory) -> str:
    """Of all that the inventory says; the same machine gives the same digest after every restart of the worker."""
    bare = msgspec.structs.replace(inventory, digest="")
    return hashlib.sha256(msgspec.msgpack.encode(bare, order="deterministic")).hexdigest()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def agent_version() -> str:
    try:
        return metadata.version("gpuyard")
    except metadata.PackageNotFoundError:
        return "unpackaged"
