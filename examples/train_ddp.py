"""Data-parallel training that is small enough to read and real enough to watch.

    torchrun --nproc-per-node=4 train_ddp.py        four ranks: one GPU each (nccl), or the CPU (gloo)
    python train_ddp.py                             one rank

A network learns to imitate a fixed random teacher. The samples of a step depend on the seed and the step alone and are
cut evenly over the ranks, and the loss is a mean: four ranks with 256 samples each therefore take the same steps as one
rank with 1024.
"""

import argparse
import hashlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

FEATURES, CLASSES = 64, 10


@dataclass(frozen=True)
class Place:
    """Where this process stands among the others. Without torchrun it is alone."""

    rank: int
    local_rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class Stopwatch:
    """Adds up the time that is spent waiting for the other ranks."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.seconds = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks, in place."""
        if self._place.world == 1:
            return tensor
        self._settle()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        self._settle()
        self.seconds += time.perf_counter() - began
        return tensor.div_(self._place.world)

    def hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """For DDP. Waiting here gives up the overlap with the backward pass, and makes the time measurable."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(self.all_reduce(bucket.buffer()))
        return done

    def _settle(self) -> None:
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)


def main() -> None:
    options = parsed_options()
    place = join()
    try:
        train(options, place)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Data-parallel training of a small network.")
    parser.add_argument("--global-batch", type=int, default=1024, help="samples per step over all ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=256, help="width of the network")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--step-sleep", type=float, default=0.0, metavar="SECONDS", help="rest after every step")
    parser.add_argument("--save", type=Path, metavar="FILE", help="rank 0 writes the parameters there")
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.global_batch <= 0 or options.global_batch % world:
        parser.error(f"--global-batch {options.global_batch} cannot be cut evenly over {world} ranks: "
                     f"choose a multiple of {world}")
    return options


def join() -> Place:
    rank, local_rank, world = (int(os.environ.get(name, default)) for name, default in
                               (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world > 1:
        if not on_gpu:
            torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Place(rank, local_rank, world, device)


def train(options: argparse.Namespace, place: Place) -> None:
    shard = options.global_batch // place.world
    print(f"start rank={place.rank} local_rank={place.local_rank} world={place.world} device={place.device} "
          f"host={socket.gethostname()} pid={os.getpid()} shard={shard}", flush=True)
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(options.seed)
    teacher = network(32).to(place.device, dtype).requires_grad_(False)
    student = network(options.hidden).to(place.device, dtype)
    watch = Stopwatch(place)
    model: nn.Module = student
    if place.world > 1:
        model = DistributedDataParallel(student)
        model.register_comm_hook(None, watch.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        step_began, watch.seconds = time.perf_counter(), 0.0
        inputs = samples(options, step)[place.rank * shard:(place.rank + 1) * shard].to(place.device, dtype)
        loss = nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss = watch.all_reduce(loss.detach().clone()).item()
        if place.is_first:
            seconds = time.perf_counter() - step_began
            print(f"gpuyard_step step={step} loss={mean_loss:.6f} seconds={seconds:.4f} "
                  f"samples_per_s={options.global_batch / seconds:.0f} comm_seconds={watch.seconds:.4f}", flush=True)
        time.sleep(options.step_sleep)

    if options.save and place.is_first:
        save(student, options.save)
    print(f"done rank={place.rank} steps={options.steps} seconds={time.perf_counter() - began:.2f} "
          f"checksum={checksum(student)}", flush=True)


def network(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES),
    )


def samples(options: argparse.Namespace, step: int) -> torch.Tensor:
    """The whole batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    return torch.randn(options.global_batch, FEATURES, generator=generator)


def save(model: nn.Module, path: Path) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".part")
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, unfinished)
    unfinished.replace(path)


def checksum(model: nn.Module) -> str:
    """Equal on all ranks, as they hold the same parameters."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    record(main)()
