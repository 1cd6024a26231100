"""NeuZip's Table 1 at the printed sizes, from measurement rows of descent."""

from __future__ import annotations

import pytest
from paperlm_kernels.bench.rows import append

from paperlm.bench.ops.descent import CAP, CASES
from paperlm.errors import RecordError
from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow
from paperlm.tables.build import table_contents
from paperlm.tables.verdicts import claim_rows

TABLE = "neuzip_table1_full"
ON_A_CARD = Project({"scale": "gpu"})
CASE = {"gpt_neo_2_7b": "GPT-Neo-XL 2.7B", "llama3_8b": "Llama-3 8B", "llama2_13b": "LLama-2 13B"}
PRINTED = {  # GiB and updates a second
    "vanilla": {"gpt_neo_2_7b": (11.22, 0.96), "llama3_8b": (30.97, 0.77)},
    "lomo": {"gpt_neo_2_7b": (6.97, 0.94), "llama3_8b": (19.47, 0.78), "llama2_13b": (26.26, 0.49)},
    "neuzip": {"gpt_neo_2_7b": (5.54, 0.70), "llama3_8b": (15.25, 0.45), "llama2_13b": (18.58, 0.28)},
}
OUT_OF_MEMORY = {
    "metric": "outcome", "unit": "", "value": 0.0, "low": 0.0, "high": 0.0, "n": 0,
    "outcome": f"out of memory: more than {CAP:g} GiB",
}  # fmt: skip


def written(folder, numbers, batch=2, loss=None, weights=None):
    """Rows as the benchmark writes them; what is not among the numbers did not fit under the cap."""
    lines = []
    for case in CASE:
        for name, found in numbers.items():
            common = {
                "op": "descent", "case": case, "method": name, "name": name, "device": "NVIDIA H200", "commit": "0",
                "versions": {"torch": "2.11.0"}, "date": "2026-01-01", "order": "natural", "scale": "full", "seed": 0,
                "shape": {"batch": batch, "seq_len": 1024},
            }  # fmt: skip
            if case not in found:
                lines.append(common | OUT_OF_MEMORY)
                continue
            memory, rate = found[case]
            ms = 1e3 / rate
            for metric, unit, value, more in (
                ("time", "ms", ms, {"measure": "update", "per_second": rate}),
                ("loss", "nats per token", (loss or {}).get(name, 11.5), {}),
                ("weights_hash", "last six digits of sha256", (weights or {}).get(name, 968_939), {}),
                ("memory", "GiB", memory, {}),
                ("resident", "GiB", 0.8 * memory, {}),
            ):
                spread = {"low": value, "high": value} if metric != "time" else {"low": 0.99 * ms, "high": 1.01 * ms}
                lines.append(common | {"metric": metric, "unit": unit, "value": value, "n": 9} | spread | more)
    path = folder / "descent.jsonl"
    path.unlink(missing_ok=True)
    append(path, lines)
    return [path]


def judged(paths):
    contents = table_contents(ON_A_CARD, TABLE, paths)
    return {(row["claim"], row["part"]): row["verdict"] for row in claim_rows(ON_A_CARD, TABLE, contents)}


def test_the_printed_numbers_as_rows_match_the_print_and_what_does_not_fit_is_out_of_memory_as_published(tmp_path):
    cells = table_contents(ON_A_CARD, TABLE, written(tmp_path, PRINTED)).cells
    for method, row in (("vanilla", "Vanilla"), ("lomo", "LOMO"), ("neuzip", "+NeuZip Lossless")):
        for case, model in CASE.items():
            memory = cells[row, f"{model} Mem"]
            right = "match" if case in PRINTED[method] else "out of memory as published"
            assert memory.verdict == right, (row, model, memory)
            loss = cells[row, f"{model} Loss"]
            assert loss.verdict == ("not comparable at this scale" if case in PRINTED[method] else right), (row, model)
    assert cells["LOMO", "Llama-3 8B Speed"].verdict == "environment-bound"
    assert "behind the first updates of fresh weights" in cells["LOMO", "Llama-3 8B Loss"].reason
    assert cells["LOMO", "Llama-3 8B Mem"].labels.endswith("2 x 1024 tokens an update, commit 0")


def test_more_memory_than_printed_differs_with_its_sign(tmp_path):
    more = PRINTED | {"lomo": PRINTED["lomo"] | {"llama3_8b": (20.47, 0.78)}}
    cell = table_contents(ON_A_CARD, TABLE, written(tmp_path, more)).cells["LOMO", "Llama-3 8B Mem"]
    assert (cell.verdict, cell.difference, cell.relative_difference) == ("differs", "+1", "+5.14%")


def test_claims_on_memory_and_speed_hold_of_the_printed_numbers_and_fail_of_worse_ones(tmp_path):
    right = judged(written(tmp_path, PRINTED))
    assert {right[f"NEU-T1F-{n}", "Llama-3 8B"] for n in (1, 2, 3, 4, 5)} == {"holds"}
    assert right["NEU-T1F-6", ""] == right["NEU-T1F-7", ""] == "holds"
    (tmp_path / "worse").mkdir()
    slow = {case: (1.3 * memory, 0.5 * rate) for case, (memory, rate) in PRINTED["neuzip"].items()}
    wrong = judged(written(tmp_path / "worse", PRINTED | {"neuzip": slow}, loss={"neuzip": 11.6}))
    assert {wrong[f"NEU-T1F-{n}", "Llama-3 8B"] for n in (1, 3, 4, 5)} == {"fails"}
    assert wrong["NEU-T1F-6", ""] == wrong["NEU-T1F-7", ""] == wrong["NEU-T1F-8", ""] == "fails"


def test_weights_of_another_hash_fail_though_losses_are_the_same(tmp_path):
    both = PRINTED | {"neuzip keep": PRINTED["neuzip"]}
    assert judged(written(tmp_path, both))["NEU-T1F-1w", "Llama-3 8B"] == "holds"
    for other in ("neuzip", "neuzip keep", "lomo"):
        (tmp_path / other).mkdir()
        wrong = judged(written(tmp_path / other, both, weights={other: 968_938}))
        assert (wrong["NEU-T1F-1w", "Llama-3 8B"], wrong["NEU-T1F-1", "Llama-3 8B"]) == ("fails", "holds")


def test_updates_of_another_size_than_declared_are_refused(tmp_path):
    with pytest.raises(RecordError, match="measured as batch 1, seq_len 1024, declared as batch 2, seq_len 1024"):
        table_contents(ON_A_CARD, TABLE, written(tmp_path, PRINTED, batch=1))


def test_cases_are_those_that_the_benchmark_measures():
    paper, _ = ON_A_CARD.table(TABLE)
    declared = {name: (case.sequences, case.length) for name, case in paper.cases.items() if case.sequences}
    assert declared == {name: (CASES[name].batch, CASES[name].seq_len) for name in CASE}


def test_nothing_of_it_is_measured_on_a_cpu():
    assert not [case for op, case in Workflow(Project({"scale": "tiny"})).measurements if op == "descent"]
