"""Declarations: everything resolves to jobs, with a source for each setting; what is kept for whom."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paperlm.checks import open_project
from paperlm.jobs import job_from
from paperlm.jobs.base import Job, parent_kinds
from paperlm.plan.exhibit import Part
from paperlm.plan.project import ROOT, Project
from paperlm.plan.resolve import _state
from paperlm.plan.workflow import Workflow, one_of
from paperlm.record.record import read_record

SCALES = sorted(p.stem for p in (ROOT / "workflow/scales").glob("*.yaml"))


def own_settings(job: Job) -> set[str]:
    """Fields of a job whose source a cell has to name."""
    return set(type(job).model_fields) - {"size", "seed"} - set(parent_kinds(type(job)))


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_every_exhibit_resolves_to_jobs_with_sourced_settings(scale):
    project = open_project({"scale": scale, "seeds": [0, 1]})
    for name in project.exhibits:
        exhibit = project.exhibit(name)[1]
        for cell in project.cells(name):
            if cell.sum_of_column:
                assert not cell.jobs
                continue
            chain = {job.kind: job for job in (cell.jobs[0], *cell.jobs[0].ancestors())}
            # A model from elsewhere has no seed of ours, nor has what is computed without a model.
            drawn = any("seed" in type(job).model_fields for job in chain.values())
            seeds = max(2, exhibit.seeds.get(scale, 0)) if drawn else 1
            assert len(cell.jobs) == seeds, (name, cell.row, cell.column)
            paper, _ = project.exhibit(name)
            assert {paper.jobs[own].kind for own in cell.sources} == set(chain)
            for own, settings in cell.sources.items():
                assert set(settings) == own_settings(chain[paper.jobs[own].kind])
                assert all(len(setting.source) > 2 for setting in settings.values())


def jobs_of(name: str, **config: object) -> set[str]:
    return {job.job_id for job in Project(config).jobs_of(name)}


def test_table_one_has_twenty_jobs_and_other_seeds_are_other_jobs():
    assert len(jobs_of("mixln_table1", scale="tiny")) == 20
    assert len(jobs_of("mixln_table1", scale="tiny", seeds=[0, 1, 2])) == 60


def test_a_row_of_some_scales_only_is_made_at_those():
    labels = {scale: {c.row for c in Project({"scale": scale}).cells("mixln_table1")} for scale in SCALES}
    assert {scale for scale, rows in labels.items() if "DeepNorm (as defined)" in rows} == {"tiny", "gpu", "paper"}


def test_a_row_of_ours_and_one_of_some_scales_only_are_not_printed():
    kinds = [(own, scales) for own in (False, True) for scales in ([], ["tiny"])]
    assert [Part(in_print=own, scales=scales).printed for own, scales in kinds] == [False, False, True, False]


def test_a_figure_that_needs_seeds_has_them_whatever_seeds_are_asked_for():
    for scale, seeds in (("smoke", 2), ("tiny", 3), ("gpu", 3), ("paper", 5)):
        assert len(jobs_of("cce_figure4", scale=scale)) == 4 * seeds
    one_more = jobs_of("cce_figure4", scale="gpu", seeds=[0, 9]) - jobs_of("cce_figure4", scale="gpu")
    assert one_more == {j for j in jobs_of("cce_figure4", scale="gpu", seeds=[9]) if "-s9-" in j}


def test_the_paper_scale_changes_nothing_that_the_paper_says():
    for cell in Project({"scale": "paper"}).cells("mixln_table1"):
        for settings in cell.sources.values():
            assert not any("scale paper" in setting.source for setting in settings.values())


def test_what_a_source_says_is_what_the_job_has():
    project = Project({"scale": "gpu"})
    for cell in (*project.cells("mixln_table1"), *project.cells("cce_figure3")):
        for job in cell.jobs:
            names = {j.kind: j for j in (job, *job.ancestors())}
            for own, settings in cell.sources.items():
                made = names[project.exhibit(cell.exhibit)[0].jobs[own].kind]
                for key, setting in settings.items():
                    if key != "norm":  # the job's has its options written out
                        value = getattr(made, key)
                        assert (list(value) if isinstance(value, tuple) else value) == setting.value, (own, key)


def test_at_paper_scale_the_models_have_the_specified_shapes():
    runs = {job.size: job for job in Project({"scale": "paper"}).jobs_of("mixln_table1")}
    shape = lambda r: (r.hidden_size, r.intermediate_size, r.n_heads, r.n_layers)  # noqa: E731
    assert shape(runs["130M"]) == (768, 2048, 12, 12)
    assert shape(runs["250M"]) == (768, 2560, 16, 24)
    assert shape(runs["1B"]) == (2048, 5461, 32, 24)
    assert (runs["1B"].steps, runs["1B"].peak_lr, runs["71M"].steps) == (50_000, 5e-4, 10_000)


def test_a_stand_in_is_trained_in_place_of_a_size_and_says_so():
    cell = Project({"scale": "gpu"}).cells("cce_figure4")[0]
    assert cell.size == "phi3.5-mini" and {job.size for job in cell.jobs} == {"gpt2"}
    assert "twelve runs take minutes" in cell.sources["pretrain"]["hidden_size"].source


def test_what_children_need_of_a_parent_is_kept_by_it():
    project = Project({"scale": "smoke"})
    asked = {(p.job_id, job.snapshot(n)) for job in project.jobs.values() for n, p in job.parents().items()}
    wanted = {pair for pair in asked if pair[1] is not None}
    assert wanted == {(job_id, update) for job_id, updates in project.keep.items() for update in updates}
    of_figure = {job.snapshot("of") for job in project.jobs_of("cce_figure3")}
    assert of_figure == {None, 0}, "trained models, and random weights"


def test_a_diverged_rule_of_a_scale_stands_in_for_the_tables():
    assert Project({"scale": "paper"}).diverged_rule("mixln_table1").threshold(450.0) == 1000
    assert Project({"scale": "tiny"}).diverged_rule("mixln_table1").threshold(450.0) == pytest.approx(405.0)
    assert Project({"scale": "tiny"}).diverged_rule("cce_figure4") is None


def test_a_share_of_a_run_is_that_part_of_its_updates_and_the_whole_run_its_end():
    parent = Project({"scale": "tiny"}).cells("lns_figure1")[0].jobs[0].of
    assert parent.steps == 900
    found = [_state(f"share {share}", parent, "here") for share in ("0", "1/900", "1/3", "7/9", "899/900", "1")]
    assert found == ["init", 1, 300, 700, 899, "end"]


def test_what_is_told_to_a_job_is_what_the_declarations_say():
    for job_id, job in Project({"scale": "smoke"}).jobs.items():
        assert job_from(json.loads(json.dumps(job.canonical()))).job_id == job_id


def test_every_committed_record_is_valid_and_still_asked_for_by_its_scale():
    found = [p for p in sorted((ROOT / "paper_tables/records").glob("*/*/*.json")) if p.parts[-3] in SCALES]
    assert found
    jobs = {scale: Project({"scale": scale, "seeds": [0, 1, 2, 3, 4]}).jobs for scale in {p.parts[-3] for p in found}}
    for path in found:
        record = read_record(path, path.stem)
        assert record.job_id in jobs[path.parts[-3]], path
        assert record.kind == path.parts[-2]


def test_a_name_in_claims_is_first_of_all_one_of_its_own_paper(root):
    known, path = Project({"scale": "tiny"}), root / "workflow/papers/lns.yaml"
    theirs = known.exhibit("mixln_table1")[1].claims_name
    ours = known.exhibit("lns_table1")[1].claims_name
    text = path.read_text()
    assert text.count(f"claims_name: {ours}\n") == 1
    path.write_text(text.replace(f"claims_name: {ours}\n", f"claims_name: {theirs}\n"))
    project = Project({"scale": "tiny"}, root)
    for name in project.exhibits:
        paper = project.exhibit(name)[0].paper.id
        if paper in ("mixln", "lns"):
            assert project.called(name)[theirs] == f"{paper}_table1", name


def test_a_sixth_paper_is_one_file_and_its_published_table(root):
    (root / "paper_tables/published/toy_table1.csv").write_text(",Small\nA,30.0\nB,20.0\n")
    paper = yaml.safe_load((root / "workflow/papers/mixln.yaml").read_text())
    paper["paper"].update(id="toy", title="Toy")
    paper |= {"deviations": [], "scales": {}, "figures": {}, "consistency": []}
    decay = {"value": 0.123, "source": "toy"}
    paper["tables"] = {
        "toy_table1": {
            "title": "Toy", "number": "Table 1", "kind": "jobs", "job": "pretrain", "metric": "ppl_true",
            "claims_name": "T1", "published": "paper_tables/published/toy_table1.csv",
            "rows": {
                "A": {"norm": {"name": "pre_ln"}, "source": "toy"},
                "B": {"norm": {"name": "pre_ln"}, "settings": {"pretrain": {"weight_decay": decay}}, "source": "toy"},
            },
            "columns": {"Small": {"size": "130M"}},
        }
    }  # fmt: skip
    (root / "workflow/papers/toy.yaml").write_text(yaml.safe_dump(paper))
    project = open_project({"scale": "smoke"}, root)
    shared, new = (cell.jobs[0].job_id for cell in project.cells("toy_table1"))
    assert project.jobs.keys() - Project({"scale": "smoke"}).jobs.keys() == {new}
    assert {"mixln_table1", "toy_table1"} <= set(project.exhibits_of(shared)), "A is Table 1's Pre-LN run of 130M"


@given(st.sets(st.text("ab_-.", min_size=1, max_size=4), min_size=1, max_size=12), st.text("ab_-.", max_size=5))
def test_the_pattern_of_a_rule_matches_the_names_of_its_jobs_and_no_other(names, other):
    pattern = one_of(sorted(names))
    assert all(re.fullmatch(pattern, name) for name in names)
    assert bool(re.fullmatch(pattern, other)) == (other in names)


def test_files_of_an_exhibit_are_those_that_it_has():
    plan = Workflow(Project({"scale": "tiny"}))
    files = set(plan._exhibit_files())
    for name in ("mixln_table1", "mixln_figure5", "lns_figure2"):
        assert (f"paper_tables/{name}.curves.svg" in files) == (name in plan.curves), name
        assert plan.has_claims(name) == bool(plan.project.exhibit(name)[1].claims)
    assert "mixln_table1" in plan.curves


@pytest.mark.parametrize(("scale", "committed"), [("gpu", True), ("tiny", False)])
def test_measurements_that_are_committed_are_those_of_a_gpu(scale, committed):
    plan = Workflow(Project({"scale": scale, "run_missing": "no"}))
    found = {plan.measurement(op, case) for op, case in plan.measurements}
    assert any(path and path.startswith("paper_tables/records") for path in found) == committed
