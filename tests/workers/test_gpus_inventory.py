import dataclasses
import socket

import psutil
from hypothesis import given
from hypothesis import strategies as st

from wire.reports import GpuInfo, Link
from workers.gpus import GpuList
from workers.inventory import NO_ANSWER, boot_id, build

names = st.text("abcdef0123456789", min_size=1, max_size=8)
infos = st.lists(
    st.builds(GpuInfo, uuid=names, index=st.integers(0, 15), vendor=st.just("nvidia"), name=names,
              memory_total_bytes=st.none() | st.integers(1, 2**40)),
    max_size=6, unique_by=lambda info: info.uuid,
)
joined = st.builds(Link, a=names, b=names, kind=st.just("NV4"))
links = st.lists(joined, max_size=6, unique_by=lambda link: (link.a, link.b))
lists = st.builds(GpuList, infos=infos, links=links, nvswitch=st.booleans(), driver=st.none() | names,
                  problem=st.none() | names)


@given(lists, st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order_of_the_driver(gpus: GpuList, random: object) -> None:
    shuffled = dataclasses.replace(gpus, infos=list(gpus.infos), links=list(gpus.links))
    random.shuffle(shuffled.infos)  # type: ignore[attr-defined]
    random.shuffle(shuffled.links)  # type: ignore[attr-defined]
    assert build(shuffled).digest == build(gpus).digest


@given(lists, lists)
def test_another_machine_has_another_digest(one: GpuList, other: GpuList) -> None:
    a, b = build(one), build(other)
    same = (a.gpus, a.links, a.nvswitch, a.driver, a.problem) == (b.gpus, b.links, b.nvswitch, b.driver, b.problem)
    assert (a.digest == b.digest) is same


def test_a_simulated_machine_is_not_taken_for_a_real_one() -> None:
    assert build(GpuList(), simulated=True).digest != build(GpuList()).digest
    assert build(GpuList(), simulated=True).simulated is True


def test_it_describes_this_machine() -> None:
    inventory = build(GpuList())
    assert inventory.hostname == socket.gethostname()
    assert inventory.boot_id == boot_id() and len(inventory.boot_id) == 36
    assert inventory.cpu_count == psutil.cpu_count()
    assert inventory.memory_total_bytes == psutil.virtual_memory().total


def test_a_reader_without_an_answer_is_a_problem_and_not_a_machine_without_gpus() -> None:
    assert build(None).problem == NO_ANSWER
    assert build(GpuList()).problem is None
