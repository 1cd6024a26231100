"""What every kind of job is: settings that can change its number, parents, data, and a name made of them.

A kind is one file in this folder: a frozen class that derives from Job, and `run(job, inputs, machine) -> Result`,
which imports what it needs when it is called. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from paperlm.errors import JobError, SpecError
from paperlm.frozen import Frozen, digest
from paperlm.norms import build_method
from paperlm.quantizers.scheme import kv_cache_of, quantization_of

if TYPE_CHECKING:
    from paperlm.data.settings import DataSettings


@dataclass(frozen=True)
class Trunk:
    """The state of a training after so many updates with its optimizer's, for a job that goes on from there."""

    update: int

    def __str__(self) -> str:
        return f"trunk-{self.update}"


Stage = int | Trunk
"What a training leaves for other jobs beside its end: its model after so many updates, or all that goes on from there."


def update_of(state: Stage) -> int:
    """Updates that it has behind it."""
    return state.update if isinstance(state, Trunk) else state


def folder_of(state: Stage) -> str:
    """Name of its folder below the model's: at-100, trunk-100."""
    return str(state) if isinstance(state, Trunk) else f"at-{state}"


def in_order(states: Iterable[Stage]) -> tuple[Stage, ...]:
    """Each once, the earliest first."""
    return tuple(sorted(set(states), key=lambda state: (update_of(state), folder_of(state))))


Head = Literal["tokens", "spans", "answers"]
"What a model predicts of a text: each next token, or where an answer in it begins and ends."

SLUG = r"[a-z0-9][a-z0-9_.-]*"


class Job(Frozen):
    """One computation whose record a table or figure is built from. Every field can change its number.

    A field with a default that was added later is left out of the hash where it has it, so that the jobs before it
    keep their names.
    """

    kind: ClassVar[str]
    "the name of the file"
    summary: ClassVar[str]
    "one line: what it does"
    behaviour: ClassVar[int] = 1
    """Raised when the same settings would give another number. It is no part of the name: a record says under which
    behaviour it was made, and one of an earlier behaviour is marked or made again."""
    leaves_model: ClassVar[bool] = False
    "whether a folder that transformers can load is left for other jobs"
    on_card: ClassVar[bool] = True
    "whether it computes on a GPU where the scale has one; False: it is given none, and runs on a processor"
    distributed: ClassVar[bool] = False
    "whether several processes under torchrun, each with a card, can share the work of one job; `unshared` says which"
    priority: ClassVar[int] = 0
    "jobs of a higher one begin first: what others wait for, and what takes so long that it would be alone at the end"
    paced_as: ClassVar[str] = ""
    "kind whose seconds per operation serve an estimate before those of its own records, as those of longer jobs"
    has_curve: ClassVar[bool] = False
    "whether its record has the series `train` and `eval` that training curves are drawn from"

    def flops(self) -> float | None:
        """Operations of the job where they follow from its settings: jobs of one kind take time in proportion. None
        where they do not."""
        return None

    def weight_count(self) -> int | None:
        """Numbers in the weights of the model that it makes, or that it works on by its field `of`; None: not said."""
        of = self.parents().get("of")
        return of.weight_count() if of is not None else None

    def card_bytes(self) -> int | None:
        """Bytes that each of its cards holds at least: weights, and where it trains gradients and the optimizer's
        moments, without activations. None: not said."""
        return None

    def parents(self) -> dict[str, Job]:
        """Field -> the job whose model it works on."""
        return {name: value for name in parent_kinds(type(self)) if isinstance(value := getattr(self, name), Job)}

    def data(self) -> list[DataSettings]:
        """What the data rule has to prepare; `Inputs.data` has the manifests in this order."""
        return []

    def metrics(self) -> tuple[str, ...] | None:
        """Names of the metrics of its record, so that a misspelt one in a table is found before the job runs; None: not
        said, and nothing is checked."""
        return None

    def series(self) -> Mapping[str, tuple[str, ...]] | None:
        """Series of its record and their columns; None: not said."""
        return None

    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """Metric -> the least and the largest value that the settings leave it where the job came to its end: a record
        that says something else is refused."""
        return {}

    def never(self) -> str:
        """Why a job of these settings makes no number on any machine; empty if one could. It is `blocked` for that."""
        return ""

    def out_of_reach(self) -> str:
        """`never` of this job or of one that it works on, whose model it then waits for in vain."""
        return next(filter(None, (job.never() for job in (self, *self.ancestors()))), "")

    def unshared(self, processes: int) -> str:
        """Why so many processes cannot share the work of this job; empty: they can, as one always does."""
        if processes == 1:
            return ""
        if not self.distributed:
            return f"a {self.kind} job knows one process only"
        batch = getattr(self, "global_batch", processes)
        return f"global_batch {batch} does not split over {processes} processes" if batch % processes else ""

    def slug(self) -> str:
        """Readable part of the name: lower case letters, digits, `_`, `.` and `-`."""
        raise NotImplementedError(f"jobs/{self.kind}.py: define slug()")

    def behaviours(self) -> dict[str, int]:
        """What computes the number -> its behaviour: the kind, and kernels that this job uses."""
        return {self.kind: self.behaviour}

    def derived(self) -> dict[str, tuple[str, str]]:
        """What follows from the settings and is worth showing: name -> (value, how it follows)."""
        return {}

    def proxy(self) -> str:
        """What its numbers stand in for, and how they differ (`the weights: drawn from ...`); empty: they are
        of the thing itself, as far as the job knows."""
        return ""

    def snapshot(self, parent: str) -> Stage | None:
        """Stage of the parent that it works on, e.g. the update after which its model is taken; None: its last. The
        field `at` says it for `of`."""
        at = getattr(self, "at", "end") if parent == "of" else "end"
        return {"end": None, "init": 0}.get(at, at)

    def snapshots(self) -> range:
        """Updates after which a child may ask for this job's model, the last one apart."""
        return range(0)

    def needs_head(self) -> Head | None:
        """What the model of `of` has to predict; None: nothing of the kind."""
        return None

    def lacks(self, head: Head) -> str:
        """Why the model that it leaves does not predict this; empty: it does, or its own parent was asked."""
        return ""

    @model_validator(mode="after")
    def fits_the_model(self) -> Job:
        if (of := self.parents().get("of")) is None:
            return self
        if (head := self.needs_head()) and (why := of.lacks(head)):
            raise ValueError(f"of: {why}")
        update = self.snapshot("of")
        if isinstance(update, int) and update not in (there := of.snapshots()):
            has = f"has states {there.start} to {there.stop - 1}" if there else "has no other state"
            raise ValueError(f"at: {getattr(self, 'at', update)}: a job of kind {of.kind!r} {has} beside its end")
        return self

    # -- the name --

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.job_id == other.job_id

    def __hash__(self) -> int:
        return hash(self.job_id)

    def __copy__(self) -> Job:
        """Without what was worked out of the fields: `model_copy` may change them."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def fields(self) -> dict[str, Any]:
        """Plain JSON values of the fields that are no jobs, but those at their default."""
        return dict(self._fields)

    @functools.cached_property
    def _fields(self) -> dict[str, Any]:
        defaults = _defaults(type(self))
        values = json.loads(self.model_dump_json(exclude=set(self.parents())))
        return {k: value for k, value in values.items() if k not in defaults or getattr(self, k) != defaults[k]}

    def canonical(self) -> dict[str, Any]:
        """The job as JSON, parents nested: what a record holds and `job_from` reads."""
        return {"kind": self.kind, **self.fields(), **{name: p.canonical() for name, p in self.parents().items()}}

    @functools.cached_property
    def job_id(self) -> str:
        """Slug and a hash of kind, fields, the data's checksums and the parents' names: sft-pre_ln-s0-3fa91c02."""
        data = [settings.fingerprint() for settings in self.data()]
        parents = {name: parent.job_id for name, parent in self.parents().items()}
        content = {"kind": self.kind, "data": data, "parents": parents, **self.fields()}
        slug = self.slug()
        if not re.fullmatch(SLUG, slug):  # it becomes a file name, a pattern and a word of a command line
            raise SpecError(f"jobs/{self.kind}.py: slug {slug!r} may hold lower case letters, digits, _, . and - only")
        return f"{slug}-{digest(content)}"

    def ancestors(self) -> Iterator[Job]:
        """Parents, theirs, and so on, nearest first; a job that is reached twice comes twice."""
        for parent in self.parents().values():
            yield parent
            yield from parent.ancestors()

    def worked_on(self) -> Iterator[Job]:
        """The jobs whose end it works on by its field `of`, nearest first: none behind one that is taken in its
        middle."""
        parent = self.parents().get("of")
        if parent is not None and self.snapshot("of") is None:
            yield parent
            yield from parent.worked_on()


@functools.cache
def _defaults(kind: type[Job]) -> Mapping[str, Any]:
    """Field of a kind -> its default, to compare with; a field that has to be given is not there."""
    fields = kind.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}


def packed_bytes() -> dict[str, int]:
    """Behaviour of a job whose record counts the bytes of packed weights."""
    from paperlm_kernels.behaviour import NEUZIP

    return {"neuzip_nbytes": NEUZIP["nbytes"]}


def kept_for(jobs: Iterable[Job]) -> dict[str, tuple[Stage, ...]]:
    """Id of a parent -> its states that these jobs need."""
    found: dict[str, set[Stage]] = {}
    for job in jobs:
        for name, parent in job.parents().items():
            if (state := job.snapshot(name)) is not None:
                found.setdefault(parent.job_id, set()).add(state)
    return {job_id: in_order(states) for job_id, states in found.items()}


def parent(*kinds: str, optional: bool = False) -> Any:
    """Annotation of a field that is a job of one of these kinds, or, of an optional one, None: `of: parent("sft")`."""

    def check(value: Any) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, dict):
            from paperlm.jobs import job_from

            value = job_from(value)
        if not isinstance(value, Job):
            raise ValueError(f"must be a job of kind {' or '.join(kinds)}")
        if value.kind not in kinds:
            raise ValueError(f"is a job of kind {value.kind!r}; it has to be of kind {' or '.join(kinds)}")
        return value

    job = SerializeAsAny[Job] | None if optional else SerializeAsAny[Job]
    return Annotated[job, BeforeValidator(check), ParentKinds(kinds)]


@dataclass(frozen=True)
class ParentKinds:
    """Mark of a field that is a job, for whoever resolves declarations."""

    kinds: tuple[str, ...]


@functools.cache
def parent_kinds(kind: type[Job]) -> Mapping[str, tuple[str, ...]]:
    """Field -> kinds of the job that it may be, for the fields of a kind that are jobs."""
    found = {}
    for name, info in kind.model_fields.items():
        for mark in info.metadata:
            if isinstance(mark, ParentKinds):
                found[name] = mark.kinds
    return found


def _in_full(build: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any] | None]:
    """Of a field that describes something with options: they are written out, so that a changed default makes a new
    job. None stays; what `build` refuses with a SpecError is refused."""

    def described(value: Any) -> dict[str, Any] | None:
        try:
            return None if value is None else build(value)
        except SpecError as error:
            raise ValueError(str(error)) from None

    return described


Norm = Annotated[dict[str, Any], AfterValidator(_in_full(lambda value: build_method(value).describe()))]
"A norm method and its options."
Quantizers = Annotated[
    dict[str, Any] | None, BeforeValidator(_in_full(lambda value: quantization_of(value).describe()))
]
"The quantizers of a model, or a preset's name; None: it has none."
KVCacheOptions = Annotated[dict[str, Any] | None, AfterValidator(_in_full(lambda value: kv_cache_of(value).described))]
"In how many bits a model keeps keys and values; None: as it was trained."

At = int | Literal["init", "end"]
"Of which state of the parent: after so many updates, before the first (`init`), after the last (`end`)."


class LooksAtModel(Job):
    """Settings of a job that looks at a model, at one state of its training."""

    of: parent("pretrain", "continue_pretrain", "sft", "rloo", "hub_model")
    "the model"
    at: At = "end"
    "of which state of it: after so many updates, before the first (`init`), after the last (`end`)"

    def card_bytes(self) -> int | None:
        """Its weights in bfloat16, where nobody says that they are more."""
        count = self.weight_count()
        return 2 * count if count else None

    def of_what(self) -> str:
        """The model's part of the name, with the state behind it where that is not the end."""
        return self.of.slug() + ("" if self.at == "end" else f"-at_{self.at}")


Seed = Annotated[int, Field(ge=0, lt=2**31)]
Beta = Annotated[float, Field(ge=0, lt=1)]
"Decay of one of Adam's two moments."


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How a job is executed here; none of it changes what is computed beyond rounding."""

    device: str = "auto"
    "auto, cpu or cuda"
    micro_batch: int = 0
    "examples per forward pass; 0 chooses"
    compile: str = "auto"
    "auto, yes or no; auto compiles on a GPU"
    checkpoint_seconds: float = 60.0
    checkpoint_updates: int = 0
    "checkpoint after every so many updates instead of by the clock"
    progress: bool = True
    stop_after: int = 0
    "stop with a checkpoint after so many updates: for tests"

    def torch_device(self) -> Any:
        """The device as torch calls it; `auto` takes a GPU if there is one. Raises JobError without one for `cuda`."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise JobError("device cuda: this PyTorch sees no GPU; use --device cpu, or run the job where there is one")
        on_gpu = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if on_gpu else "cpu")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Where a job finds what it needs, and where it leaves what it makes. All paths are local."""

    data: tuple[Path, ...] = ()
    "manifest of each of `job.data()`"
    models: dict[str, Path] = field(default_factory=dict)
    "parent's field -> checked folder of its model, of the snapshot that the job asks for"
    work: Path
    "folder that outlives a kill: checkpoints and other unfinished work of this job alone"
    model: Path | None = None
    "empty folder for the model, if the kind leaves one; the caller adds the manifest"
    keep: tuple[Stage, ...] = ()
    "states that children need; they go into `model / at-<update>` and `model / trunk-<update>`"
