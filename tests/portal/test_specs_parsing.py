"""The specification: what is accepted, and with which sentence everything else is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portal.services import spec_values, specs
from portal.services.errors import Problem
from tests.portal.conftest import make_node

WHOLE = {
    "name": "resnet50-ddp",
    "project": "vision",
    "launcher": "torchrun",
    "command": "train.py --epochs 1",
    "layout": {"data": 2, "tensor": 2},
    "source": {"path": "/shared/code"},
    "resources": {
        "gpus": 4,
        "nodes": {"min": 1, "max": 2},
        "gpu": ["A100", "H100"],
        "memory": "24 GiB",
        "link": "nvlink",
    },
    "env": {"NAME": "value"},
    "time_limit": "1h30m",
    "retries": 1,
}


def refusal(**fields: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        specs.parse({"command": "run", **fields})
    assert caught.value.errors, "a refusal names its field"
    return caught.value


def test_a_whole_specification_survives_storing_and_yaml() -> None:
    spec = specs.parse(WHOLE)
    assert (spec.resources.memory, spec.time_limit) == (24 * 2**30, 5400)
    assert specs.parse(spec.stored()) == spec
    assert specs.from_yaml(specs.to_yaml(spec)) == spec


def test_the_least_specification_is_a_command() -> None:
    spec = specs.parse({"command": "/opt/run.sh 3"})
    assert (spec.title, spec.launcher, spec.resources.gpus, spec.stored()) == (
        "run.sh",
        "script",
        1,
        {"command": "/opt/run.sh 3"},
    )


def test_one_model_may_stand_without_a_list() -> None:
    assert specs.parse({"command": "x", "resources": {"gpu": "H100"}}).resources.gpu == ["H100"]


@pytest.mark.parametrize("gpus", ["8", 1.5, True, None, -1, 10**9, 2**63, [1], {}])
def test_gpus_is_a_whole_number_and_nothing_that_looks_like_one(gpus: Any) -> None:
    problem = refusal(resources={"gpus": gpus})
    assert problem.status == 400 and [error["field"] for error in problem.errors] == ["resources.gpus"]


@pytest.mark.parametrize(("fields", "field", "words"), [
    ({"resources": {"nodes": 0}}, "resources.nodes.min", "at least 1"),
    ({"resources": {"nodes": "2"}}, "resources.nodes", "write a whole number, or min and max"),
    ({"resources": {"nodes": {"min": 3, "max": 2}}}, "resources.nodes", "min 3 is more than max 2"),
    ({"resources": {"gpus": 3, "nodes": 2}}, "resources", "3 GPUs cannot be spread evenly over 2 nodes"),
    ({"resources": {"memory": "24"}}, "resources.memory", "24GB"),
    ({"resources": {"memory": 24}}, "resources.memory", "24GB"),
    ({"resources": {"memory": "-1GB"}}, "resources.memory", "24GB"),
    ({"resources": {"link": "infiniband"}}, "resources.link", "'nvlink'"),
        ({"resources": {"mig": "half"}}, "resources.mig", "write one profile"),
        ({"resources": {"mig": "2 × 1g.10gb"}}, "resources.mig", "write one profile"),
        ({"resources": {"mig": "1g.10gb", "gpus": 2}}, "resources.gpus", "a process sees one MIG slice only"),
        ({"resources": {"mig": "1g.10gb", "gpus": 2}, "launcher": "torchrun"}, "resources.gpus", "NCCL does not span"),
        ({"resources": {"mig": "1g.10gb", "gpus": 0}}, "resources.gpus", "0 slices"),
        ({"resources": {"mig": "1g.10gb", "link": "nvlink"}}, "resources.link", "leave it out"),
    ({"resources": {"ram": "64GB"}}, "resources.ram", "not available yet"),
    ({"resources": {"gpu": [7]}}, "resources.gpu.0", "write text"),
    ({"time_limit": "0s"}, "time_limit", "at least 1"),
    ({"time_limit": "-5m"}, "time_limit", "90s, 30m, 12h or 2d"),
    ({"time_limit": "NaN"}, "time_limit", "90s, 30m, 12h or 2d"),
    ({"time_limit": 3600}, "time_limit", "90s, 30m, 12h or 2d"),
    ({"time_limit": "367d"}, "time_limit", "at most"),
    ({"command": ""}, "command", "write what is to be run"),
    ({"command": "echo 'half"}, "command", "no closing quotation"),
    ({"command": "x" * 32769}, "command", "at most 32 KiB"),
    ({"command": ["a", "b"]}, "command", "write text"),
    ({"launcher": "deepspeed"}, "launcher", "use script or torchrun"),
    ({"runtime": {"kind": "docker", "image": "x"}}, "runtime.kind", "use process"),
    ({"layout": {"data": 2}}, "layout", "2 × 1 × 1 is 2, but resources.gpus is 1"),
    ({"source": {"git": "https://x"}}, "source.git", "not available yet"),
    ({"source": {"path": "../etc"}}, "source.path", "absolute path"),
    ({"source": {"path": "/a/../etc"}}, "source.path", "leave out the .."),
    ({"source": {}}, "source", "write path"),
    ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "env", "CUDA_VISIBLE_DEVICES is reserved"),
    ({"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}, "env", "reserved"),
    ({"env": {"GPUYARD_JOB_ID": "1"}}, "env", "reserved"),
    ({"env": {"LD_PRELOAD": "/x.so"}}, "env", "reserved"),
    ({"env": {"A=B": "1"}}, "env", "not a variable name"),
    ({"env": {"": "1"}}, "env", "not a variable name"),
    ({"env": {"A": 1}}, "env.A", "write text"),
    ({"env": {"A": "x" * 32769}}, "env", "longer than 32 KiB"),
    ({"launcher": "torchrun", "env": {"RANK": "0"}}, "env", "RANK is set by torchrun"),
    ({"name": "x" * 201}, "name", "at most 200 characters; this has 201"),
    ({"name": "a\u202eb"}, "name", "writing-direction"),
    ({"name": "a\nb"}, "name", "line breaks"),
    ({"priority": "high"}, "priority", "use normal"),
    ({"after": [3]}, "after", "not available yet"),
    ({"array": "0-9"}, "array", "not available yet"),
    ({"checkpoint": {"signal": "USR1"}}, "checkpoint", "not available yet"),
    ({"retries": -1}, "retries", "at least 0"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_the_way_out(fields: dict[str, Any], field: str, words: str) -> None:
    problem = refusal(**fields)
    assert problem.status == 400 and field in {error["field"] for error in problem.errors}
    assert words in problem.detail and field.split(".")[0] in problem.detail


def test_every_wrong_field_is_named_at_once() -> None:
    problem = refusal(resources={"gpus": -1, "memory": "x"}, launcher="y")
    assert {error["field"] for error in problem.errors} == {"resources.gpus", "resources.memory", "launcher"}


@pytest.mark.parametrize("field", ["state", "owner", "node", "run_as"])
def test_unknown_fields_are_refused_not_ignored(field: str) -> None:
    assert refusal(**{field: "x"}).code == "unknown_field"


@pytest.mark.parametrize("fields", [
    {"name": "a\x00b"}, {"env": {"A": "\x00"}}, {"env": {"A\x00": "b"}}, {"name": "\ud800"},
    {"resources": {"gpu": ["\x00"]}},
])  # fmt: skip
def test_text_that_no_database_stores_is_refused(fields: dict[str, Any]) -> None:
    assert refusal(**fields).code == "invalid_string"


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_a_specification_is_an_object(data: Any) -> None:
    with pytest.raises(Problem, match="object"):
        specs.parse(data)


@pytest.mark.parametrize("text", ["command: [", "a: !!python/object:os.system x", "\x07", "- 1", "&a [*a, *a]"])
def test_bad_yaml_is_a_sentence(text: str) -> None:
    with pytest.raises(Problem) as caught:
        specs.from_yaml(text)
    assert caught.value.status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*specs.JobSpec.model_fields, "other"]), json_values, max_size=6))
@settings(max_examples=400, deadline=None)
def test_whatever_is_sent_is_a_specification_or_a_refusal_with_fields(data: dict[str, Any]) -> None:
    try:
        spec = specs.parse(data)
    except Problem as problem:
        assert problem.status == 400 and problem.errors and problem.detail
    else:
        assert specs.parse(spec.stored()) == spec


@given(st.integers(1, 10**15), st.integers(1, 10**7))
def test_sizes_and_durations_read_back_as_they_were_written(count: int, seconds: int) -> None:
    assert spec_values.duration_s(spec_values.duration_text(seconds)) == seconds
    if count < 10**9 or count % 10**6 == 0:
        assert spec_values.size_bytes(spec_values.size_text(count)) == count


@pytest.mark.parametrize(("resources", "field", "words"), [
    ({"gpus": 9}, "resources.gpus", "the largest node has 8 GPUs"),
    ({"gpu": "XYZ"}, "resources.gpu", "no node has GPUs called XYZ; there are: H100"),
    ({"memory": "100GB"}, "resources.memory", "the largest GPU has 85.9 GB"),
    ({"gpus": 16, "nodes": 2}, "resources.nodes", "there is 1"),
])  # fmt: skip
def test_what_no_machine_can_host_is_refused(db: None, resources: dict[str, Any], field: str, words: str) -> None:
    make_node("n1")
    with pytest.raises(Problem) as caught:
        specs.check_satisfiable(specs.parse({"command": "x", "resources": resources}))
    assert (caught.value.status, caught.value.code, caught.value.errors[0]["field"]) == (422, "unsatisfiable", field)
    assert words in caught.value.detail


def test_load_and_contact_do_not_make_a_request_unsatisfiable(db: None) -> None:
    make_node("n1", schedulable=False)
    specs.check_satisfiable(specs.parse({"command": "x", "resources": {"gpus": 8, "gpu": "H100"}}))
