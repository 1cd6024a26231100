"""NeuZip's Table 1 at scale paper: what the paper prints as Loss and Mem has columns that are compared with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support_c4 import c4_texts
from support_tables import edited, record_of

from paperlm.data.tokenizer import TextTokenizer, packed
from paperlm.errors import RecordError, SpecError
from paperlm.evaluate.perplexity import ValidationLosses
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.tables.build import printed_table, table_contents

TABLE = "neuzip_table1"
GIB = 2**30


def contents(scale, folder, **metrics):
    """The table of records that all say the same."""
    project = Project({"scale": scale})
    folder.mkdir(exist_ok=True)
    paths = []
    for job in {job.job_id: job for cell in project.cells(TABLE) for job in cell.jobs}.values():
        paths.append(folder / f"{job.job_id}.json")
        known = {name: metrics.get(name, 1.0) for name in job.metrics() if metrics.get(name) != "older"}
        counts = {name: bound[0] for name, bound in job.bounds().items()}
        write_record(paths[-1], record_of(job, known | counts, outcome="trained"))
    return table_contents(project, TABLE, paths).cells


def test_the_loss_by_words_and_the_measured_peak_match_the_print_and_the_loss_by_tokens_is_not_compared(tmp_path):
    cells = contents("paper", tmp_path, loss_word=8.812, peak_bytes=11.22 * GIB)
    for model in ("GPT-Neo-XL 2.7B", "Llama-3 8B"):
        cell, printed = cells["LOMO", f"{model} Loss a word"], {"GPT-Neo-XL 2.7B": "8.81", "Llama-3 8B": "8.61"}[model]
        assert cell.published == printed and cell.regenerated == "8.81"
        assert cells["LOMO", f"{model} Loss"].verdict == "not comparable at this scale"
    assert cells["LOMO", "GPT-Neo-XL 2.7B Loss a word"].verdict == "match"
    assert cells["LOMO", "Llama-3 8B Loss a word"].verdict == "differs"
    assert cells["Vanilla", "GPT-Neo-XL 2.7B Peak"].verdict == "match"
    assert cells["LOMO", "GPT-Neo-XL 2.7B Peak"].difference == "+4.25"
    assert cells["Vanilla", "LLama-2 13B Peak"].verdict == "differs", "the paper prints OOM, and this is a number"


def test_below_scale_paper_neither_is_compared(tmp_path):
    cells = contents("gpu", tmp_path, peak_bytes=11.22 * GIB)
    assert (cells["Vanilla", "GPT-Neo-XL 2.7B Peak"].verdict, ("Vanilla", "Llama-3 8B Loss a word") in cells) == (
        "not printed",
        False,
    )


def test_a_column_that_is_compared_with_none_of_the_print_or_is_printed_itself_is_refused(tmp_path):
    for label, other, words in (
        ("Llama-3 8B Peak", "Llama-3 8B Memory", "compared_with: unknown column.*did you mean 'Llama-3 8B Mem'"),
        ("Llama-3 8B Loss", "Llama-3 8B Mem", "Llama-3 8B Loss: is printed itself; leave compared_with out"),
    ):
        root = edited(
            tmp_path / label,
            "neuzip",
            lambda p, label=label, other=other: p["tables"][TABLE]["columns"][label].update(compared_with=other),
        )
        with pytest.raises(SpecError, match=words):
            table_contents(Project({"scale": "tiny"}, root), TABLE, [])


def test_a_words_loss_is_the_mean_loss_of_a_chunk_times_its_length_over_all_chunks_by_words():
    losses = ValidationLosses(np.array([7 * 2.0, 7 * 3.0, 0.0]), np.array([7, 7, 0]))
    assert losses.loss_word(10) == pytest.approx((8 * 2.0 + 8 * 3.0) / 10)


@pytest.mark.parametrize(("name", "off"), [("t5", 2), ("bpe1024", 0)])  # T5's normalization makes other white space
def test_words_are_those_of_the_text_however_it_is_cut_into_rows(name, off):
    tokenizer, texts = TextTokenizer(name), c4_texts("validation")[:20]
    rows, left = [], []
    for ids in tokenizer.encode(texts):
        found, left = packed(ids, left, 64)
        rows += found
    assert tokenizer.words([*rows, left]) == sum(len(text.split()) for text in texts) + off
    assert tokenizer.words([[*left, *[tokenizer.pad] * 9]]) == tokenizer.words([left]), "padding spells nothing"


def test_the_loss_of_a_word_at_scale_paper_is_of_the_whole_test_split():
    project = Project({"scale": "paper"})
    (job,) = {cell.jobs[0].job_id: cell.jobs[0] for cell in project.cells(TABLE) if cell.metric == "loss_word"
              and (cell.row, cell.size) == ("LOMO", "neuzip_2.7B")}.values()  # fmt: skip
    assert job.dataset == "hub:Salesforce/wikitext_2" and job.validation_tokens > 1.43 * 241_211
    assert printed_table(project, TABLE).cell("LOMO", "Llama-3 8B Loss") == "8.61"
    assert math.log(job.vocab_size) * 1.43 > 8.81, "a uniform guess of T5's pieces is above the printed loss"


def test_a_record_that_is_older_than_a_column_s_metric_is_named_with_what_makes_it_again(tmp_path):
    with pytest.raises(RecordError, match=r"older than the metric 'loss_word'; .*paperlm run \S+ --again"):
        contents("paper", tmp_path, loss_word="older")
