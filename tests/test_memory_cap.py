"""A cap on a card's memory, as of a smaller card: it holds while a job measures, and what needs more is an outcome."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from support import smoke_run
from support_field_values import WIDE
from support_small_jobs import job
from support_tables import record_of

from paperlm.evaluate.cap import GIB, capped, under_cap
from paperlm.jobs import stored_answers, stored_perplexity, stored_speed, text_to_sql
from paperlm.jobs.base import Inputs, Machine
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.result import Result
from paperlm.tables.build import table_contents

QUIET = Machine(device="cpu", progress=False)
CARD = torch.device("cuda")
FOUND = Result(outcome="measured", metrics={"iterations_per_second": 2.0, "peak_bytes": 7})
OF = {"of": smoke_run()}
KINDS = {
    "stored_speed": (stored_speed, OF),
    "stored_perplexity": (stored_perplexity, OF | {"text": "bundled:c4_sample"}),
    "stored_answers": (stored_answers, {"timed": True}),
    "text_to_sql": (text_to_sql, {"timed": True, **WIDE}),
}
"Kind -> its module, and settings of a job that is measured on a card."


@pytest.fixture
def card(monkeypatch):
    """A stand-in for a GPU of 80 GiB; what the allocator was told: (index, share)."""
    told = []
    monkeypatch.setattr(Machine, "torch_device", lambda machine: CARD)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    properties = lambda index: SimpleNamespace(total_memory=80 * GIB)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    fraction = lambda share, index: told.append((index, share))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction)
    return told


def full():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def test_the_cap_is_a_share_of_the_card_and_is_gone_behind_it(card):
    with capped(CARD, 20.0):
        assert card == [(3, 0.25)], "the allocator wants an index"
    assert card == [(3, 0.25), (3, 1.0)]


def test_a_card_that_is_smaller_than_the_cap_keeps_what_it_has(card):
    with capped(torch.device("cuda", 1), 96.0):
        assert card == [(1, 1.0)]


def test_without_a_cap_the_card_is_left_alone_and_its_error_is_the_callers(card):
    assert under_cap(CARD, None, lambda: FOUND) is FOUND
    with pytest.raises(torch.cuda.OutOfMemoryError):
        under_cap(CARD, None, full)
    assert card == []


def test_what_needs_more_than_the_cap_is_out_of_memory_and_other_errors_stay_and_the_cap_is_gone(card):
    assert under_cap(CARD, 40.0, full) == Result(outcome="out_of_memory")
    with pytest.raises(ZeroDivisionError):
        under_cap(CARD, 40.0, lambda: 1 / 0)
    assert card == [(3, 0.5), (3, 1.0)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_measures_under_its_cap_and_ends_as_out_of_memory_where_that_is_too_small(
    kind, card, tmp_path, monkeypatch
):
    module, settings = KINDS[kind]
    wanted, inputs = job(kind, **settings, cap_gib=40.0), Inputs(work=tmp_path)
    begun = "paperlm.train.text_to_sql.start_world" if kind == "text_to_sql" else f"{module.__name__}._measured"
    seen = []
    monkeypatch.setattr(begun, lambda *given: seen.append(list(card)) or full())
    assert module.run(wanted, inputs, QUIET).outcome == "out_of_memory"
    assert seen == [[(3, 0.5)]] and card == [(3, 0.5), (3, 1.0)]
    without = wanted.model_copy(update={"cap_gib": None})
    with pytest.raises(torch.cuda.OutOfMemoryError):
        module.run(without, inputs, QUIET)
    assert seen[1:] == [card] and len(card) == 2, "without one nothing is changed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_without_a_cap_keeps_its_name_and_one_with_a_cap_has_another(kind):
    settings = KINDS[kind][1]
    plain = job(kind, **settings)
    assert plain.job_id == job(kind, **settings, cap_gib=None).job_id and "cap_gib" not in plain.canonical()
    assert len({plain.job_id, *(job(kind, **settings, cap_gib=gib).job_id for gib in (40.0, 47.5))}) == 3


def test_a_cap_that_no_card_could_keep_is_refused():
    for kind, (_, settings) in KINDS.items():
        for gib in (0, -1):
            with pytest.raises(ValidationError, match="greater than 0"):
                job(kind, **settings, cap_gib=gib)
    for kind in ("stored_answers", "text_to_sql"):
        with pytest.raises(ValidationError, match="set timed, or leave cap_gib out"):
            job(kind, cap_gib=47.5)


def test_perplexity_under_a_cap_is_blocked_without_a_gpu(tmp_path):
    wanted = job("stored_perplexity", **KINDS["stored_perplexity"][1], cap_gib=47.5)
    found = stored_perplexity.run(wanted, Inputs(work=tmp_path), QUIET)
    assert found.outcome == "blocked" and "none here" in found.reason


@pytest.mark.parametrize(("gib", "at_once"), [(47.5, 1), (None, 0)])
def test_a_smaller_card_gets_one_window_at_a_time(gib, at_once, card, tmp_path, monkeypatch):
    """As many as this card holds would not fit there."""
    asked = []
    monkeypatch.setattr(stored_perplexity, "read_documents", lambda manifest: ["words " * 40])
    monkeypatch.setattr("paperlm.evaluate.windows.windows_of", lambda *given: [[1, 2], [3, 4]])
    monkeypatch.setattr(stored_perplexity, "load_into_stores", lambda *given: None)
    monkeypatch.setattr(stored_perplexity, "counted", lambda *given: {})
    losses = lambda model, windows, machine, title: asked.append(machine.micro_batch) or [1.0, 2.0]  # noqa: E731
    monkeypatch.setattr("paperlm.evaluate.windows.mean_losses", losses)
    wanted = job("stored_perplexity", **KINDS["stored_perplexity"][1], cap_gib=gib)
    found = stored_perplexity.run(wanted, Inputs(data=(tmp_path,), models={"of": tmp_path}, work=tmp_path), QUIET)
    assert asked == [at_once] and found.metrics["loss"] == 1.5


SMALLER = ("stored_speed", "stored_perplexity")
"Kinds of which every job of the tables is measured on a card."


def test_at_scale_paper_what_is_measured_has_the_memory_of_the_papers_card_and_elsewhere_that_of_its_own():
    tables = [f"neuzip_table{number}" for number in ("1", "2", "3a", "3b", "4")]
    for scale, table in itertools.product(("smoke", "tiny", "gpu", "paper"), tables):
        jobs = {job for cell in Project({"scale": scale}).cells(table) for job in cell.jobs}
        timed = {job for job in jobs if job.kind in SMALLER or getattr(job, "timed", False)}
        assert {job.cap_gib for job in timed} == {47.5 if scale == "paper" else None}
        assert {getattr(job, "cap_gib", None) for job in jobs - timed} <= {None}


def test_of_table_1_descent_on_the_13b_model_that_does_not_fit_is_out_of_memory_as_published(tmp_path):
    """NEU-T1-6 reads NeuZip's number alone; the outcome is in the cell."""
    project, paths = Project({"scale": "paper"}), []
    for cell in project.cells("neuzip_table1"):
        if cell.column != "LLama-2 13B Peak":
            continue
        for one in cell.jobs:
            paths.append(tmp_path / f"{one.job_id}.json")
            ended = {"outcome": "out_of_memory"} if cell.row == "Vanilla" else {}
            write_record(paths[-1], record_of(one, {} if ended else dict.fromkeys(one.metrics(), 19.9 * GIB), **ended))
    contents = table_contents(project, "neuzip_table1", paths)
    cell = contents.cells["Vanilla", "LLama-2 13B Peak"]
    assert (cell.regenerated, cell.verdict) == ("out of memory", "out of memory as published")
    assert contents.cells["+NeuZip Lossless", "LLama-2 13B Peak"].regenerated == "19.90"
