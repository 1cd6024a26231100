"""From the declarations of a paper and a scale to jobs: which value every setting has, and who says so.

Precedence of a setting, weakest first: default of the kind, model size (paperlm.models.sizes), the paper's job, the
paper's size, the exhibit's row or column, the scale, the scale's size, the paper's own changes at the scale, those for
the size. What a scale changes, a row cannot set.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from paperlm.errors import SpecError
from paperlm.jobs import Job, kind_of
from paperlm.jobs.base import parent_kinds
from paperlm.kept import kept
from paperlm.load import parse
from paperlm.models.sizes import ALL_SIZES
from paperlm.plan.exhibit import Part, Setting, Settings
from paperlm.plan.paper import UNCHANGED, PaperSpec, ScaleChanges
from paperlm.plan.scale import Changes, ScaleSpec

SHAPE = ("hidden_size", "intermediate_size", "n_heads", "n_layers")


@dataclass(frozen=True)
class Context:
    """What a row and a column say about the jobs of their cell."""

    size: str = ""
    norm: Mapping[str, Any] | None = None
    norm_source: str = ""
    settings: Mapping[str, Settings] = field(default_factory=dict)
    "name of a job -> settings"
    instead: Mapping[str, str] = field(default_factory=dict)
    "name of a job -> the one in its place"

    def joined(self, *parts: Part) -> Context:
        """With what rows and columns contribute; SpecError if two of them say different things."""
        found = self
        for part in parts:
            for key in ("size", "norm"):
                theirs = getattr(part, key)
                if theirs and getattr(found, key) and getattr(found, key) != theirs:
                    raise SpecError(f"row and column both give a {key}: {getattr(found, key)} and {theirs}; keep one")
            merged = {name: {**found.settings.get(name, {}), **s} for name, s in part.settings.items()}
            found = replace(
                found,
                size=part.size or found.size,
                norm=part.norm or found.norm,
                norm_source=part.source if part.norm else found.norm_source,
                settings={**found.settings, **merged},
                instead={**found.instead, **part.instead},
            )
        return found

    @functools.cached_property
    def said(self) -> str:
        """What decides a job beside its name and seed, as a key."""
        settings = {
            name: {key: setting.value for key, setting in values.items()} for name, values in self.settings.items()
        }
        return json.dumps([self.size, self.norm, settings, dict(self.instead)])


@dataclass(frozen=True)
class Resolved:
    """A job, and for each job of its chain, by the paper's name for it, every setting with its source."""

    job: Job
    sources: dict[str, dict[str, Setting]]


class Resolver:
    """Jobs of one paper at one scale. Cells that ask for the same job get the same object."""

    def __init__(self, paper: PaperSpec, scale: ScaleSpec) -> None:
        self.paper, self.scale = paper, scale
        self._known: dict[tuple[str, str, int], Resolved] = {}
        self._settings: dict[tuple[str, str], Settings] = {}

    @functools.cached_property
    def _own(self) -> ScaleChanges:
        return self.paper.scales.get(self.scale.scale, UNCHANGED)

    def trained_size(self, size: str) -> str:
        """The model size that is trained where a size is asked for."""
        return self._own.stand_ins[size].size if size in self._own.stand_ins else size

    def job(self, name: str, context: Context, where: str, seed: int = 0) -> Resolved:
        """The paper's job of that name in a context. `where` starts the message of a SpecError."""
        name = context.instead.get(name, name)
        spec = self.paper.jobs[name]
        pinned = spec.with_
        if pinned.size or pinned.norm:
            context = replace(
                context,
                size=pinned.size or context.size,
                norm=pinned.norm or context.norm,
                norm_source=f"jobs.{name}.with" if pinned.norm else context.norm_source,
            )
        key = (name, context.said, seed)
        if key not in self._known:
            self._known[key] = self._resolve(name, context, where, seed)
        return self._known[key]

    def _resolve(self, name: str, context: Context, where: str, seed: int) -> Resolved:
        spec, kind = self.paper.jobs[name], kind_of(self.paper.jobs[name].kind)
        settings = self.settings(name, context)
        values: dict[str, Any] = {key: setting.value for key, setting in settings.items()}
        sources = dict(settings)
        if "size" in kind.model_fields:
            if not context.size:
                raise SpecError(f"{where}: job {name!r} needs a size: give one in the row or the column")
            values["size"] = self.trained_size(context.size)
        if "norm" in kind.model_fields:
            norm, source = self.norm(context, where)
            values["norm"], sources["norm"] = norm, Setting(value=norm, source=source)
        if "seed" in kind.model_fields:
            values["seed"] = seed
        chain: dict[str, dict[str, Setting]] = {}
        for key in parent_kinds(kind):
            if key in spec.parents:
                parent = self.job(spec.parents[key], context, where, seed)
                values[key] = parent.job
                chain = {**parent.sources, **chain}
        if "at" in values and isinstance(values.get("of"), Job):
            values["at"] = _state(values["at"], values["of"], f"{where}, job {name}")
        job = parse(values, kind, f"{where}, job {name}")
        return Resolved(job, {name: sources, **chain})

    def settings(self, name: str, context: Context) -> Settings:
        """Every setting of a job but size, norm and seed, with its source."""
        key = (name, context.said)
        if key not in self._settings:  # the same for every seed
            self._settings[key] = self._settings_of(name, context)
        return self._settings[key]

    def _settings_of(self, name: str, context: Context) -> Settings:
        kind, size = kind_of(self.paper.jobs[name].kind), context.size
        fields = {key: info for key, info in kind.model_fields.items() if key not in parent_kinds(kind)}
        found: Settings = {}
        for key, info in fields.items():
            if not info.is_required():
                value = info.get_default(call_default_factory=True)
                found[key] = Setting(value=value, source=f"default of a {kind.kind} job")
        if size and set(SHAPE) <= set(fields):
            shape = ALL_SIZES[self.trained_size(size)]
            why = f"scale {self.scale.scale}: {self._own.stand_ins[size].why}; " if size in self._own.stand_ins else ""
            found |= {key: Setting(value=getattr(shape, key), source=why + shape.source) for key in SHAPE}
        lineage = self.paper.lineage(name)
        for one in lineage:
            found |= self.paper.jobs[one].settings
        for one in lineage if size in self.paper.sizes else ():
            found |= self.paper.sizes[size].jobs.get(one, {})
        changes = self.changes(name, size)
        own = {key: setting for key, setting in context.settings.get(name, {}).items() if key not in changes}
        found = found | own | changes
        return {key: setting for key, setting in found.items() if key in fields}

    @kept
    def changes(self, name: str, size: str) -> Settings:
        """What the scale changes of a job, with the scale as source."""
        kind = self.paper.jobs[name].kind
        layers: list[Changes] = [
            self.scale.jobs.get(kind, {}),
            self.scale.sizes.get(size, {}).get(kind, {}),
            *(self._own.jobs.get(one, {}) for one in self.paper.lineage(name)),
            *(self._own.sizes.get(size, {}).get(one, {}) for one in self.paper.lineage(name)),
        ]
        merged = {key: change for layer in layers for key, change in layer.items()}
        return {key: Setting(value=c.value, source=f"scale {self.scale.scale}: {c.why}") for key, c in merged.items()}

    def norm(self, context: Context, where: str) -> tuple[dict[str, Any], str]:
        """The method with the size's options filled in, and its source."""
        if context.norm is None:
            raise SpecError(f"{where}: no norm: give one in the row or the column")
        return self._norm(dict(context.norm), context, where, context.norm_source or "the job's `with`")

    def _norm(self, norm: dict[str, Any], context: Context, where: str, source: str) -> tuple[dict[str, Any], str]:
        method = norm.get("name", "")
        for option, value in norm.items():
            if value == {"of": "size"}:
                options = (
                    self.paper.sizes[context.size].norm.get(method, {}) if context.size in self.paper.sizes else {}
                )
                if option not in options:
                    raise SpecError(
                        f"{where}: {method} takes {option} from the size, and "
                        f"sizes.{context.size}.norm.{method}.{option} is missing: add it"
                    )
                norm[option] = options[option].value
                source = f"{source}; {option}: {options[option].source}"
        if isinstance(norm.get("base"), dict):
            norm["base"], source = self._norm(dict(norm["base"]), context, where, source)
        return norm, source


def _state(at: Any, parent: Job, where: str) -> int | str:
    """A job's `at` as the update it means, `init` or `end`; SpecError for what is no state of the parent."""
    if at in ("init", "end"):
        update = 0 if at == "init" else None
    elif (share := _share(at)) is not None:
        update = round(share * parent.snapshots().stop)
        update = None if update == parent.snapshots().stop else update
        at = "init" if update == 0 else "end" if update is None else update
    else:
        update = int(at) if isinstance(at, int | str) and not isinstance(at, bool) and str(at).isdecimal() else -1
    if update is None or update in parent.snapshots():
        return at
    remedy = "it keeps its last state alone: leave `at` out"
    if there := parent.snapshots():
        start = "init, end, an update from 0" if not there.start else f"end, an update from {there.start}"
        remedy = f"write {start} to {there.stop - 1}, or a part of the run, e.g. share 1/2"
    raise SpecError(f"{where}: at: {at!r} is no state of {parent.job_id}: {remedy}")


def _share(at: Any) -> Fraction | None:
    """The part of a run, 0 to 1, that `share 1/2` means; None for anything else."""
    try:
        share = Fraction(at.removeprefix("share ")) if isinstance(at, str) and at.startswith("share ") else None
    except (ValueError, ZeroDivisionError):
        return None
    return share if share is not None and 0 <= share <= 1 else None
