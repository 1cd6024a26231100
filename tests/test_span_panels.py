"""Panels of published models in Mix-LN Figure 2 and LayerNorm Scaling Figure 2: what they are made of, and drawn."""

import csv

import pytest
from pydantic import ValidationError
from support_figures import records_of
from support_probe import Pretrained
from support_tables import edited, record_of

from paperlm.checks import open_project
from paperlm.errors import SpecError
from paperlm.figures.base import write_figure
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.block_removal import BlockRemoval
from paperlm.jobs.hub_model import run as read_from_hub
from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow
from paperlm.record.record import write_record
from paperlm.result import Series

ROW = "BERT-large (Post-LN)"
QA = "hub:google-bert/bert-large-uncased-whole-word-masking-finetuned-squad"
both = pytest.mark.parametrize("name", ["mixln_figure2cd", "lns_figure2"])


@both
def test_the_panels_of_bert_are_of_all_of_squad_at_scale_paper_and_have_stand_ins_elsewhere(name):
    found = {cell.row: cell.jobs for cell in Project({"scale": "paper"}).cells(name)}
    (job,) = found[ROW]
    assert job.task == "squad" and job.items is None and job.source == "hub" and job.max_length == 384
    assert job.of.name == QA and job.evaluation().stride == 128
    for scale in ("smoke", "tiny", "gpu"):
        assert ROW not in {cell.row for cell in Project({"scale": scale}).cells(name)}


def test_each_printed_model_is_a_row_and_those_that_cannot_be_read_say_why(tmp_path):
    found = {cell.row: cell.jobs[0] for cell in Project({"scale": "paper"}).cells("lns_figure2")}
    printed = ("Mistral-7B", "Qwen-7B", "DeepSeek-7B", "LLaMA2-7B", "LLaMA2-13B")
    assert {ROW, *(f"{name} (Pre-LN)" for name in printed)} <= set(found)
    model = found["Qwen-7B (Pre-LN)"].of
    assert model.data() == [], "nothing is fetched"
    result = read_from_hub(model, Inputs(work=tmp_path), Machine(device="cpu", progress=False))
    assert result.outcome == "blocked" and "never run" in result.reason
    assert found["DeepSeek-7B (Pre-LN)"].of.data() != [], "its pickle is read"


@both
def test_they_share_one_job_that_is_granted_memory_for_the_largest_model(name):
    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}))
    (job,) = next(cell.jobs for cell in plan.project.cells(name) if cell.row == ROW)
    assert job in plan.project.jobs_of("mixln_figure2cd") and job in plan.project.jobs_of("lns_figure2")
    assert plan.job_size(job.job_id).mem_mb * 1e6 > 13e9 * 4, "LLaMA2-13B in float32"


@pytest.mark.parametrize(
    ("name", "claim", "drops", "verdict"),
    [
        ("mixln_figure2cd", "MIX-F2-2", lambda block: 0.01 * block, "holds"),
        ("mixln_figure2cd", "MIX-F2-2", lambda block: 0.5 / block, "fails"),
        ("lns_figure2", "LNS-F2-1r", lambda block: 0.01 * block, "holds"),
        ("lns_figure2", "LNS-F2-1r", lambda block: 0.5 / block, "fails"),
    ],
)
def test_a_record_of_squad_is_drawn_and_judged(tmp_path, name, claim, drops, verdict):
    project = Project({"scale": "paper"})
    paths = records_of(project, name, tmp_path / "records")
    (job,) = next(cell.jobs for cell in project.cells(name) if cell.row == ROW)
    columns = job.series()["removal"]
    rows = [[block, 0.8 - drops(block), drops(block), 0.001, 0.9, 0.0, 0.001] for block in range(1, 25)]
    write_record(
        tmp_path / f"records/{job.job_id}.json",
        record_of(
            job,
            {"full/accuracy": 0.8, "full/f1": 0.9},
            series={"removal": Series(columns=list(columns), rows=rows)},
            standard_errors={"full/accuracy": 0.001, "full/f1": 0.001},
        ),
    )
    write_figure(project, name, paths, tmp_path / f"{name}.svg")
    drawn = [float(r["drop"]) for r in csv.DictReader((tmp_path / f"{name}.csv").open()) if r["row"] == ROW]
    assert drawn == pytest.approx([100 * drops(block) for block in range(1, 25)])
    claims = {r["claim"]: r["verdict"] for r in csv.DictReader((tmp_path / f"{name}.claims.csv").open())}
    assert claims[claim] == verdict
    assert "Hugging Face's fine-tuned one" in (tmp_path / f"{name}.notes.txt").read_text()


def another_model(row: str, name: str):
    return lambda p: p["figures"]["mixln_figure2cd"]["rows"][row]["settings"]["open_model"]["name"].update(value=name)


@pytest.mark.parametrize(
    ("row", "model", "message"),
    [
        (ROW, "hub:meta-llama/Llama-2-7b-hf", r"mixln_figure2cd \[BERT-large .* LlamaForCausalLM, which marks no span"),
        (
            ROW,
            "hub:google-bert/bert-large-uncased",
            r"a BertForMaskedLM, which marks no span.* models that do: .*squad",
        ),
        ("LLaMA2-7B (Pre-LN)", QA, r"\[LLaMA2-7B .* BertForQuestionAnswering, which predicts no next token"),
    ],
)
def test_a_row_with_a_model_of_another_head_is_refused_when_the_project_is_opened(tmp_path, row, model, message):
    root = edited(tmp_path, "mixln", another_model(row, model))
    with pytest.raises(SpecError, match=message):
        open_project({"scale": "paper"}, root)


def test_squad_is_not_asked_of_a_model_that_was_trained_here():
    with pytest.raises(ValidationError, match="'pretrain'; it has to be of kind hub_model"):
        BlockRemoval(of=Pretrained(), task="squad", source="bundled", max_length=48)
