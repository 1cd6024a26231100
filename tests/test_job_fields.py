"""Every field of every kind of job reaches what it is for: changed, it changes that, and leaves the rest as it was."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support_field_values import Elsewhere, Seen
from support_fields import EFFECTS
from support_small_jobs import BASE, job
from support_toy_registry import toy_registry

from paperlm.data import registry as registry_module
from paperlm.jobs import Job, job_kinds
from paperlm.jobs.base import Machine
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.result import Cost
from paperlm.run import Maker

HERE, JOBS = "tests/support_fields.py", "tests/support_small_jobs.py"
OF_A_GPU = ("stored_speed", "drawn_speed")
"Kinds that are blocked on a CPU."
KEPT = (0, 2)
"States of a training that its children here ask for."


class Workshop:
    """Makes jobs as `paperlm run` does, and says what came out, part by part. trl is told everything and trains not."""

    def __init__(self, root: Path, local_data: Path) -> None:
        self.places, self.local_data = Places(root, "smoke"), str(local_data)
        self.told: dict[str, dict[str, Any]] = {}
        "job id -> what trl or lm-eval was told while the job was made"
        self.outcome = functools.cache(self._outcome)

    def _outcome(self, wanted: Job) -> dict[str, Any]:
        for parent in wanted.parents().values():
            self.outcome(parent)
        kept = tuple(update for update in KEPT if update in wanted.snapshots()) if wanted.has_curve else ()
        keep = {wanted.job_id: kept} if kept else {}  # trained by the engine, which keeps states
        self.now = self.told.setdefault(wanted.job_id, {})
        machine = Machine(device="cpu", progress=False)
        Maker(self.places, machine, self.local_data, keep).with_parents(wanted)
        record = read_record(self.places.root / self.places.made(wanted), wanted.job_id)
        assert record.outcome in ("trained", "measured") or wanted.kind in OF_A_GPU, record
        found = {"slug": wanted.slug(), "labels": record.labels, "data": [data.data_id for data in record.data]}
        found |= {f"metrics.{name}": value for name, value in record.metrics.items()}
        found |= {f"series.{name}": series.rows for name, series in record.series.items()}
        folder = self.places.root / self.places.model(wanted)
        for part, name in (("weights", "."), ("weights at 0", "at-0")):
            if (path := folder / name / "model.safetensors").is_file():
                found[part] = digest_of(path.read_bytes())
        return found | self.now

    def train(self, build: Any, job: Job, inputs: Any, machine: Any, **told: Any) -> Any:
        """In place of paperlm.finetune.common.train: builds the trainer, notes what it was told, and ends at once."""
        from paperlm.finetune.common import Trained

        trainer = build(told["rows"])
        self.now |= {f"trl.{name}": getattr(value, "value", value) for name, value in vars(trainer.args).items()}
        self.now |= {"rows": json.dumps(list(trainer.train_dataset)), "every": told.get("every", 0)}
        self.now["start"] = digest_of(
            b"".join(p.float().numpy().tobytes() for p in trainer.model.state_dict().values())
        )
        updates, evaluate = told["updates"], told.get("evaluate")
        keys = ("loss", "learning_rate", "accuracy", "margin", "reward", "reward_std", "kl", "completions/mean_length")
        history = [{"step": step, **dict.fromkeys(keys, 0.5)} for step in range(1, updates + 1)]
        if evaluate:
            history += [{"step": step, "held_out": evaluate(trainer.model)} for step in (0, updates)]
        return Trained(trainer.model, True, history, updates, 11, Cost(wall_seconds=0.0))

    def ask(self, answer: Any) -> Any:
        """lm-eval's question to a model, noted together with the answers."""

        def asked(lm: Any, requests: list[Any], **options: Any) -> Any:
            answers = answer(lm, requests, **options)
            self.now["requests"] = [*self.now.get("requests", []), *(request.args for request in requests)]
            self.now["answers"] = [*self.now.get("answers", []), *answers]
            return answers

        return asked


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    from paperlm.evaluate.harness import CountingLM
    from paperlm.finetune import common

    folder = tmp_path_factory.mktemp("fields")
    made, toys = Workshop(folder, folder / "local"), toy_registry(folder / "local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry_module, "registry", lambda: toys)
        patch.setattr(common, "train", made.train)
        patch.setattr(CountingLM, "loglikelihood", made.ask(CountingLM.loglikelihood))
        yield made


@pytest.mark.parametrize("kind", sorted(job_kinds()))
def test_every_field_of_a_kind_has_an_entry_that_says_where_it_is_seen(kind):
    fields, entries = job_kinds()[kind].model_fields, EFFECTS.get(kind, {})
    assert kind in BASE, f"jobs/{kind}.py: add the settings of a small {kind} job to BASE in {JOBS}"
    for name in fields:
        assert name in entries, (
            f"jobs/{kind}.py, field {name}: add it to EFFECTS[{kind!r}] in {HERE}: Seen(another value, where that "
            "shows), or Elsewhere(why no test here can see it)"
        )
    assert set(entries) <= set(fields), f"{HERE}: {kind} has no field {', '.join(set(entries) - set(fields))}"


@pytest.mark.parametrize("kind", sorted(job_kinds()))
def test_a_record_has_the_metrics_and_series_that_its_kind_says_it_has(workshop, kind):
    """Tables and figures are checked against what a kind says, before any record is there."""
    made = job(kind)
    workshop.outcome(made)
    record = read_record(workshop.places.root / workshop.places.made(made))
    if record.outcome == "blocked":
        pytest.skip(record.reason)
    if made.metrics() is not None:
        assert set(record.metrics) == set(made.metrics())
    if made.series() is not None:
        assert {name: tuple(series.columns) for name, series in record.series.items()} == made.series()


@pytest.mark.usefixtures("workshop")
@pytest.mark.parametrize("kind", sorted(kind for kind, cls in job_kinds().items() if "at" in cls.model_fields))
def test_a_state_that_the_model_does_not_have_is_refused_by_every_kind_that_names_one(kind):
    """The training of BASE has five updates: what goes on from it, or is read, is its state after 0 to 4 of them."""
    keeps_states = bool(job(kind).of.snapshots())
    if keeps_states:
        assert job(kind, at=4).at == 4
    for at in (5, -1) if keeps_states else (4, 0):
        with pytest.raises(
            ValidationError,
            match=r"states 0 to 4 beside its end|the trunk has 5 updates|than 0" if keeps_states else "no other state",
        ):
            job(kind, at=at)


def cases() -> list[Any]:
    return [
        pytest.param(kind, name, seen, id=f"{kind}-{name}" + (f"-{seen.to}" if len(several) > 1 else ""))
        for kind, entries in EFFECTS.items()
        for name, entry in entries.items()
        if not isinstance(entry, Elsewhere)
        for several in [entry if isinstance(entry, tuple) else (entry,)]
        for seen in several
    ]


@pytest.mark.parametrize(("kind", "name", "seen"), cases())
def test_a_changed_field_changes_what_it_is_for_and_leaves_the_rest(workshop, kind, name, seen: Seen):
    before = workshop.outcome(job(kind, **seen.given))
    after = workshop.outcome(job(kind, **seen.given | seen.also | {name: seen.to}))
    for part in seen.where.split(","):
        part, _, value = part.partition("=")
        assert part in before or part in after, f"there is no {part}: {', '.join(before)}"
        assert before.get(part) != after.get(part), f"{kind}: {part} is the same for another {name}"
        assert not value or str(after[part]) == value, f"{kind}: {part} with {name}: {seen.to}"
    for part in filter(None, seen.stays.split(",")):
        assert before[part] == after[part], f"{kind}: {name} has changed {part}"
