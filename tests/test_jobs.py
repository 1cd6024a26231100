"""Jobs are values: a name made of everything that can change the number and of nothing else; kinds are scanned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from support import smoke_run

from paperlm.data import registry
from paperlm.errors import SpecError
from paperlm.jobs import job_from, job_kinds, kind_of, parse_job
from paperlm.jobs.base import parent_kinds
from paperlm.jobs.pretrain import Pretrain
from paperlm.jobs.rank_probability import RankProbability
from paperlm.load import load
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import ROOT, Project
from paperlm.plan.resolve import Context, Resolver


def ranks(**changes: object) -> RankProbability:
    return RankProbability.model_validate({"of": smoke_run(), "tokens": 64, **changes})


# -- names ----

OTHER = {
    "size": "130M", "hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_layers": 8,
    "norm": {"name": "mix_ln", "post_layers": 4}, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "initializer_range": 0.01,
    "embed_init_std": 0.6325, "zero_last_embedding_row": True, "seq_len": 64, "example": "split", "train_examples": 99,
    "validation_tokens": 999, "adam_betas": (0.9, 0.95), "adam_eps": 1e-6, "weight_decay": 0.1, "grad_clip": 1.0,
    "peak_lr": 2e-3, "warmup_fraction": 0.2, "final_lr_fraction": 0.0, "steps": 5, "global_batch": 8, "loss_group": 4,
    "numerics": "fp32_master", "seed": 1, "eval_every": 3, "loss": "cce_exact", "curve": "every_update",
    "optimizer": "adamw", "schedule": "linear", "warmup_at_least": 1, "decay_norms": False,
    "quantization": "b158", "sub_norm": True, "hidden_act": "relu2", "tie_word_embeddings": True,
}  # fmt: skip
FIXED = {
    "vocab_size", "tokenizer", "dataset", "end_lr", "phase_at", "second_peak_lr", "second_weight_decay",
    "weights", "fused_norms",
}  # fmt: skip
"One value only, or one with another: the next test but one changes what they stand for."


def test_a_jobs_name_changes_with_every_setting():
    assert set(OTHER) | FIXED == set(Pretrain.model_fields)
    names = {smoke_run(**{key: value}).job_id for key, value in OTHER.items()}
    assert len(names | {smoke_run().job_id}) == len(OTHER) + 1


def test_a_job_that_went_through_json_has_its_name_and_equals_itself():
    for job in (smoke_run(), ranks(at=2)):
        again = job_from(json.loads(json.dumps(job.canonical())))
        assert again == job and hash(again) == hash(job) and type(again) is type(job)
    assert ranks() != smoke_run() and smoke_run(seed=1) != smoke_run()


def test_other_text_or_another_tokenizer_makes_another_job(monkeypatch):
    before, child = smoke_run().job_id, ranks().job_id
    changed = registry.registry().model_copy(deep=True)
    entry = changed.datasets["c4_sample"].files["train"][0]
    changed.datasets["c4_sample"].files["train"][0] = entry.model_copy(update={"sha256": "0" * 64})
    monkeypatch.setattr(registry, "registry", lambda: changed)
    assert smoke_run().job_id != before and ranks().job_id != child


def test_another_parent_makes_another_child():
    assert ranks(of=smoke_run(seed=1)).job_id != ranks().job_id
    assert ranks(at="init").job_id != ranks().job_id != ranks(tokens=65).job_id


def test_behaviour_is_no_part_of_the_name(monkeypatch):
    before = smoke_run().job_id, ranks().job_id
    monkeypatch.setattr(Pretrain, "behaviour", Pretrain.behaviour + 1)
    assert (smoke_run().job_id, ranks().job_id) == before
    assert smoke_run().behaviours() == {"pretrain": Pretrain.behaviour}


def test_a_changed_copy_of_a_job_is_another_one():
    job = smoke_run()
    assert job.job_id and job.fields()
    changed = job.model_copy(update={"seed": 4})
    assert changed == smoke_run(seed=4) != job and changed.fields()["seed"] == changed.canonical()["seed"] == 4


def test_a_setting_added_later_leaves_the_names_of_the_jobs_before_it():
    plain = smoke_run()
    assert "curve" not in plain.fields() and "loss" not in plain.fields()
    assert smoke_run(curve="thinned", loss="cross_entropy").job_id == plain.job_id

    class Longer(Pretrain):
        later: int = 7

    value = plain.fields()
    assert Longer.model_validate(value).job_id == plain.job_id != Longer.model_validate({**value, "later": 8}).job_id


def test_the_options_of_a_method_are_written_out_so_that_a_changed_default_makes_a_new_job():
    assert smoke_run(norm={"name": "mix_ln", "post_layers": 3}).norm.keys() > {"name", "post_layers"}


def test_the_slug_says_size_method_loss_and_seed():
    assert smoke_run(seed=3).job_id.startswith("llama_71m-mix_ln-s3-")
    wrapped = {"name": "scaled_init", "base": {"name": "deep_norm", "preset": "authors_dev"}}
    assert smoke_run(norm=wrapped).job_id.startswith("llama_71m-scaled_init.deep_norm.authors_dev-s0-")
    assert smoke_run(loss="cce_kahan").job_id.startswith("llama_71m-mix_ln-cce_kahan-s0-")


@pytest.mark.parametrize("size", ["71m;rm", "../71m", "a b", "71m\n", "$(true)"])
def test_a_name_that_a_shell_or_a_path_would_read_is_refused(size):
    with pytest.raises(SpecError, match=r"jobs/pretrain.py: slug .* letters, digits, _, \. and - only"):
        _ = smoke_run(size=size).job_id


def test_every_job_of_every_scale_has_a_name_of_its_own_that_is_safe_in_paths_and_patterns():
    import re

    for scale in ("smoke", "gpu"):
        jobs_there = Project({"scale": scale}).jobs
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9_.-]*-[0-9a-f]{8}", name) for name in jobs_there)
        assert len({json.dumps(job.canonical(), sort_keys=True) for job in jobs_there.values()}) == len(jobs_there)


# -- kinds ----


@pytest.mark.parametrize("name", sorted(job_kinds()))
def test_every_kind_documents_itself_and_every_setting_it_hashes_is_no_matter_of_the_machine(name):
    kind = job_kinds()[name]
    assert kind.summary and kind.__doc__ and isinstance(kind.behaviour, int)
    assert not {"device", "micro_batch", "compile", "checkpoint_seconds", "progress"} & set(kind.model_fields)
    for field, kinds in parent_kinds(kind).items():
        assert set(kinds) <= set(job_kinds()), f"{name}.{field}"
        assert all(job_kinds()[k].leaves_model for k in kinds), f"{name}.{field} works on a model"


def test_a_parent_of_the_wrong_kind_is_refused():
    with pytest.raises(ValidationError, match="is a job of kind 'rank_probability'; it has to be of kind pretrain"):
        ranks(of=ranks())
    with pytest.raises(SpecError, match="is a job of kind 'rank_probability'; it has to be of kind pretrain"):
        parse_job({"kind": "rank_probability", "tokens": 1, "of": ranks().canonical()})
    with pytest.raises(ValidationError, match="must be a job of kind pretrain"):
        ranks(of=7)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "pretran"}, "unknown kind of job 'pretran'; did you mean 'pretrain'"),
        ({"steps": 3}, r"a job is written as \{kind: <kind>"),
        ([], r"a job is written as \{kind: <kind>"),
        ({"kind": "base"}, "unknown kind of job 'base'"),
        ({"kind": "rank_probability", "tokens": 1, "of": {"kind": "pretran"}}, "did you mean 'pretrain'"),
        ({"kind": "rank_probability", "tokens": 0, "of": smoke_run().canonical()}, "tokens"),
        ({"kind": "rank_probability", "tokenz": 1, "of": smoke_run().canonical()}, "tokenz"),
    ],
)
def test_what_is_no_job_is_refused_and_the_fix_named(value, message):
    with pytest.raises(SpecError, match=message):
        parse_job(value)


# -- a kind of one's own ----


def test_a_kind_in_a_folder_that_is_appended_is_found_and_knows_its_parents(toy_kinds):
    model = parse_job({"kind": "toy_model", "steps": 5})
    number = parse_job({"kind": "toy_number", "of": model.canonical(), "at": 2})
    assert {"toy_model", "toy_number", "pretrain"} <= set(job_kinds())
    assert number.parents() == {"of": model} and list(number.ancestors()) == [model]
    assert number.snapshot("of") == 2 and parse_job({"kind": "toy_number", "of": model}).snapshot("of") is None


BROKEN = {
    "wrong_name": (
        "class A(Job):\n    kind: ClassVar[str] = 'other'\ndef run(job, inputs, machine): ...",
        "has to be the file's name",
    ),
    "no_run": ("class A(Job):\n    kind: ClassVar[str] = 'no_run'", r"define run\(job, inputs, machine\)"),
    "two": (
        "class A(Job):\n    kind: ClassVar[str] = 'two'\nclass B(A):\n    kind: ClassVar[str] = 'two'\n"
        "def run(job, inputs, machine): ...",
        "two classes derive from Job",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_kind_is_refused_and_the_fix_named(toy_kinds, name):
    text, message = BROKEN[name]
    (toy_kinds / f"{name}.py").write_text(f"from typing import ClassVar\nfrom paperlm.jobs.base import Job\n{text}\n")
    job_kinds.cache_clear()
    with pytest.raises(SpecError, match=rf"jobs/{name}.py: .*{message}"):
        job_kinds()


def paper_with(tmp_path: Path, jobs_: dict) -> Path:
    paper = {"paper": {"id": "toy", "title": "Toy", "arxiv": "0", "code": "none"}, "jobs": jobs_}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(paper))
    return path


def test_a_job_like_another_has_its_settings_and_those_of_scales_but_for_its_own():
    from paperlm.plan.project import Project

    project = Project({"scale": "gpu"})
    cells = {cell.column: cell for cell in project.cells("mixln_table2")}
    zero, five = cells["MMLU"].jobs[0], cells["MMLU (5-shot)"].jobs[0]
    assert (zero.few_shot, five.few_shot) == (0, 5)
    assert five.tasks == zero.tasks and five.source == zero.source == "local" and five.of == zero.of
    assert "MMLU (5-shot)" not in {cell.column for cell in Project({"scale": "tiny"}).cells("mixln_table2")}


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ({"a": {"like": "b"}, "b": {"like": "a"}}, r"jobs\.a\.like: goes in a circle: a -> b -> a"),
        ({"a": {"like": "c"}}, r"jobs\.a\.like: unknown job 'c'"),
    ],
)
def test_likeness_in_a_circle_or_to_nothing_is_refused(toy_kinds, tmp_path, jobs, message):
    spec = {name: {"kind": "toy_model", **job} for name, job in jobs.items()}
    with pytest.raises(SpecError, match=message):
        load(paper_with(tmp_path, spec), PaperSpec)


def test_jobs_that_work_on_each_other_in_a_circle_are_refused(toy_kinds, tmp_path):
    circle = {name: {"kind": "toy_chain", "of": of} for name, of in (("a", "b"), ("b", "c"), ("c", "b"))}
    with pytest.raises(SpecError, match=r"jobs\.b: works on itself, by way of c"):
        load(paper_with(tmp_path, circle), PaperSpec)
    with pytest.raises(SpecError, match=r"jobs\.a: works on itself"):
        load(paper_with(tmp_path, {"a": {"kind": "toy_chain", "of": "a"}}), PaperSpec)


def test_a_paper_file_uses_a_kind_of_ones_own_like_any_other(toy_kinds, tmp_path):
    three = {"value": 3, "source": "a test"}
    made = {
        "model": {"kind": "toy_model", "settings": {"steps": three}},
        "number": {"kind": "toy_number", "of": "model"},
    }
    paper = load(paper_with(tmp_path, made), PaperSpec)
    found = Resolver(paper, Project({"scale": "smoke"}).scale).job("number", Context(), "here", seed=4)
    assert found.job == parse_job({"kind": "toy_number", "of": {"kind": "toy_model", "steps": 3, "seed": 4}})
    assert found.sources["model"]["steps"].source == "a test"
    assert found.sources["number"]["factor"].source == "default of a toy_number job"


def test_no_kind_of_the_project_is_left_out_of_the_scan():
    files = {p.stem for p in (ROOT / "src/paperlm/jobs").glob("*.py")} - {"__init__", "base"}
    assert files == {name for name in job_kinds() if kind_of(name).__module__ == f"paperlm.jobs.{name}"}
