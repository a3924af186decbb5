"""The job specification: one validator for REST, the form and the command line. Nothing is ignored in silence."""

from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from portal.scheduler.cycle import why_never
from portal.scheduler.snapshot import JobRequest
from portal.services import capacity, spec_values
from portal.services.errors import Problem
from portal.services.spec_errors import described

MAX_GPUS = 1024
MAX_NODES = 128
MAX_TIME_LIMIT_S = 366 * 86_400
MAX_RETRIES = 10

Size = Annotated[
    int,
    BeforeValidator(spec_values.size_bytes),
    PlainSerializer(spec_values.size_text, return_type=str),
    Field(json_schema_extra={"type": "string", "examples": ["24GB"]}),
]
Duration = Annotated[
    int,
    BeforeValidator(spec_values.duration_s),
    Field(ge=1, le=MAX_TIME_LIMIT_S, json_schema_extra={"type": "string", "examples": ["12h"]}),
    PlainSerializer(spec_values.duration_text, return_type=str),
]


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


def not_yet(value: Any, what: str) -> None:
    """For fields that the specification has and this version does not act upon: refused, never ignored."""
    if value not in (None, [], {}):
        raise ValueError(f"{what} not available yet; leave it out")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NodeRange(Strict):
    min: int = Field(ge=1, le=MAX_NODES)
    max: int = Field(ge=1, le=MAX_NODES)

    @model_validator(mode="before")
    @classmethod
    def from_number(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value}
        if not isinstance(value, dict):
            raise ValueError("write a whole number, or min and max")
        return value

    @model_validator(mode="after")
    def ordered(self) -> "NodeRange":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self

    @model_serializer
    def shortest(self) -> int | dict[str, int]:
        return self.min if self.min == self.max else {"min": self.min, "max": self.max}


class Resources(Strict):
    gpus: int = Field(default=1, ge=0, le=MAX_GPUS)
    nodes: NodeRange = NodeRange(min=1, max=1)
    gpu: Annotated[list[Annotated[str, Field(min_length=1, max_length=60)]], BeforeValidator(as_list)] = Field(
        default=[], max_length=16
    )
    memory: Size | None = None
    mig: str | None = None
    link: Literal["any", "nvlink", "pcie-switch"] = "any"
    cpus_per_gpu: Any = None
    ram: Any = None

    @field_validator("gpu")
    @classmethod
    def models(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in value if name.strip()))

    @field_validator("mig")
    @classmethod
    def one_profile(cls, value: str | None) -> str | None:
        return spec_values.mig_profile(value) if value is not None else None

    @field_validator("cpus_per_gpu", "ram")
    @classmethod
    def unavailable(cls, value: Any, info: Any) -> None:
        words = {"cpus_per_gpu": "counting CPUs is", "ram": "counting memory of the node is"}
        not_yet(value, words[info.field_name])

    @model_validator(mode="after")
    def divisible(self) -> "Resources":
        counts = range(self.nodes.min, self.nodes.max + 1)
        if not any(self.gpus % count == 0 for count in counts):
            raise ValueError(f"{self.gpus} GPUs cannot be spread evenly over {self.nodes.max} nodes")
        if 0 < self.gpus < self.nodes.min:
            raise ValueError(f"{self.gpus} GPUs are fewer than {self.nodes.min} nodes")
        return self


class Layout(Strict):
    data: int = Field(default=1, ge=1, le=MAX_GPUS)
    tensor: int = Field(default=1, ge=1, le=MAX_GPUS)
    pipeline: int = Field(default=1, ge=1, le=MAX_GPUS)

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline


class Source(Strict):
    path: str | None = Field(default=None, max_length=1024)
    bundle: Any = None
    git: Any = None
    ref: Any = None

    @field_validator("bundle", "git", "ref")
    @classmethod
    def unavailable(cls, value: Any, info: Any) -> None:
        not_yet(value, f"{info.field_name} as a source is")

    @field_validator("path")
    @classmethod
    def absolute(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith("/"):
            raise ValueError("write an absolute path on the nodes, such as /shared/code")
        if ".." in value.split("/"):
            raise ValueError("leave out the ..; name the directory itself")
        return value

    @model_validator(mode="after")
    def complete(self) -> "Source":
        if self.path is None:
            raise ValueError("write path: an absolute path on the nodes")
        return self


class Runtime(Strict):
    kind: str = "process"

    @field_validator("kind")
    @classmethod
    def available(cls, value: str) -> str:
        if value != "process":
            raise ValueError(f"{value[:40]!r} is not available; use process")
        return value

    @model_validator(mode="before")
    @classmethod
    def only_kind(cls, value: Any) -> Any:
        """An image belongs to another kind of runtime: say that, rather than "unknown field"."""
        kind = value.get("kind") if isinstance(value, dict) else None
        return {"kind": kind} if isinstance(kind, str) and kind != "process" else value


class JobSpec(Strict):
    name: str | None = None
    project: str | None = Field(default=None, max_length=40)
    launcher: str = "script"
    command: str
    layout: Layout | None = None
    source: Source | None = None
    resources: Resources = Resources()
    runtime: Runtime = Runtime()
    env: dict[str, str] = {}
    time_limit: Duration | None = None
    priority: str = "normal"
    retries: int = Field(default=0, ge=0, le=MAX_RETRIES)
    checkpoint: Any = None
    array: Any = None
    after: Any = None

    @field_validator("name")
    @classmethod
    def checked_name(cls, value: str | None) -> str | None:
        return spec_values.job_name(value) if value is not None else None

    @field_validator("launcher")
    @classmethod
    def known_launcher(cls, value: str) -> str:
        if value not in {"script", "torchrun"}:
            raise ValueError(f"{value[:40]!r} is not available; use script or torchrun")
        return value

    @field_validator("command")
    @classmethod
    def splittable(cls, value: str) -> str:
        spec_values.command_words(value)
        return value

    @field_validator("env")
    @classmethod
    def checked_env(cls, value: dict[str, str]) -> dict[str, str]:
        return spec_values.environment(value)

    @field_validator("priority")
    @classmethod
    def normal_only(cls, value: str) -> str:
        if value != "normal":
            raise ValueError(f"{value[:40]!r} is not available yet; use normal or leave it out")
        return value

    @field_validator("checkpoint", "array", "after")
    @classmethod
    def unavailable(cls, value: Any, info: Any) -> None:
        words = {"checkpoint": "checkpoint signals are", "array": "job arrays are", "after": "waiting for jobs is"}
        not_yet(value, words[info.field_name])

    @model_validator(mode="after")
    def consistent(self) -> "JobSpec":
        gpus = self.resources.gpus
        if self.layout is not None and self.layout.ranks != max(gpus, 1):
            shape = f"{self.layout.data} × {self.layout.tensor} × {self.layout.pipeline}"
            raise ValueError(f"layout: {shape} is {self.layout.ranks}, but resources.gpus is {gpus}")
        if self.resources.mig is not None:
            spec_values.check_slices(self.launcher, gpus, self.resources.link)
        if self.launcher == "torchrun":
            taken = spec_values.TORCHRUN_ENV.intersection(self.env)
            taken |= {name for name in self.env if name.startswith(spec_values.TORCHRUN_PREFIX)}
            if taken:
                raise ValueError(f"env: {min(taken)} is set by torchrun and cannot be given")
        return self

    @property
    def title(self) -> str:
        """The given name, else the word that is run."""
        if self.name:
            return self.name
        word = spec_values.command_words(self.command)[0].rsplit("/", 1)[-1]
        return "".join(char if char.isprintable() else "?" for char in word)[: spec_values.MAX_NAME] or "job"

    def request(self, job_id: int, not_before: float | None = None) -> JobRequest:
        """What the scheduler needs to know of it."""
        resources = self.resources
        return JobRequest(
            id=job_id,
            gpus=resources.gpus,
            models=tuple(resources.gpu),
            memory_bytes=resources.memory,
            link=resources.link,
            nodes_min=resources.nodes.min,
            nodes_max=resources.nodes.max,
            not_before=not_before,
            mig=resources.mig or "",
        )

    def stored(self) -> dict[str, Any]:
        """As it is kept with the job, and read back by `parse`."""
        return self.model_dump(mode="json", exclude_defaults=True)


def parse(data: object) -> JobSpec:
    """-> the specification. Raises Problem 400 that names every field which is wrong, and how."""
    if not isinstance(data, dict):
        raise Problem(400, "invalid_spec", "A job specification is an object with fields such as command.")
    bad = spec_values.unstorable(data)
    if bad is not None:
        message = "holds a NUL, half a character, or is nested too deeply"
        raise Problem(400, "invalid_string", f"{bad}: {message}.", errors=[{"field": bad, "message": message}])
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise described(error) from error


class PlainLoader(yaml.SafeLoader):
    """YAML without anchors: a few lines of them can stand for more than the memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not taken", event.start_mark)
        return super().compose_node(parent, index)


def load_yaml(text: str) -> object:
    """-> plain data, not yet checked. Raises Problem 400 that names the line."""
    try:
        return yaml.load(text, Loader=PlainLoader)  # noqa: S506, a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Problem(400, "invalid_yaml", f"This is not YAML: {yaml_place(error)}.") from error


def from_yaml(text: str) -> JobSpec:
    return parse(load_yaml(text))


def to_yaml(spec: JobSpec) -> str:
    return yaml.safe_dump(spec.stored(), sort_keys=False, allow_unicode=True, width=120)


def check_satisfiable(spec: JobSpec) -> None:
    """Raises Problem 422 if no machine of this cluster could host it even when empty."""
    found = why_never(spec.request(0).needs, tuple(capacity.node_views()))
    if found is not None:
        field, sentence = found
        detail = f"Can never start: {sentence}"
        raise Problem(422, "unsatisfiable", detail, errors=[{"field": field, "message": sentence}])


def yaml_place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {what}" if mark is not None else what
