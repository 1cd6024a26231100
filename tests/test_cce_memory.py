"""Cut Cross-Entropy's Table A3 and its figures: numbers that follow from shapes alone, to the printed digit."""

from __future__ import annotations

import csv

import pytest
from support_cce import Bench
from support_tables import edited

from paperlm.checks import open_project
from paperlm.cost.access import OURS, PUBLISHED, UPDATE, accesses
from paperlm.cost.loss import gradient_bytes
from paperlm.cost.memory import Setup, quantities
from paperlm.errors import SpecError
from paperlm.figures.base import Drawing, notes, write_figure
from paperlm.figures.largest_batch import numbers
from paperlm.figures.measured_bars import bars
from paperlm.plan.project import Project
from paperlm.tables.arithmetic import table_setup, three_digits
from paperlm.tables.build import sibling, table_contents, write_table
from paperlm.tables.published import half_a_digit, number
from paperlm.tables.verdicts import claim_rows

# -- Table A3: arithmetic ----


def test_every_quoted_cell_of_table_a3_comes_out_to_the_printed_digit(project):
    quoted = {k: d for k, d in table_contents(project, "cce_tableA3", []).cells.items() if d.published}
    assert len(quoted) == 27 and {d.verdict for d in quoted.values()} == {"match"}
    assert all(d.regenerated == d.published for d in quoted.values())


def test_cells_of_table_a3_that_were_never_found_say_so_and_have_numbers(project):
    cells = table_contents(project, "cce_tableA3", []).cells
    assert (cells["Phi 3.5 Mini", "Increase"].verdict, cells["Phi 3.5 Mini", "Increase"].regenerated) == (
        "not found",
        "1.7x",
    )
    assert cells["GPT 2", "Logits (MB)"].verdict == "not found" and cells["GPT 2", "Width"].verdict == "not printed"
    assert len(cells) == 17 * 11 and all(d.regenerated for d in cells.values())


def test_the_largest_batch_fills_the_cards_exactly(paper):
    setup = table_setup(paper, "cce_tableA3")
    for model in (paper.models[name] for name in paper.tables["cce_tableA3"].models):
        found = quantities(model, setup)
        left = 16 * 75 * 2**30 - 8 * model.elements
        assert found["before"] * (4 * model.vocab + 2 * model.layers * model.width) == pytest.approx(left)
        assert found["after"] * 2 * model.layers * model.width == pytest.approx(left)
        assert found["increase"] == pytest.approx(1 + 2 * model.vocab / (model.layers * model.width))


def test_terms_are_those_of_65536_tokens_in_mebibytes(project):
    """Gemma 2 (2B): 65,536 x 256,000 float32 are 64,000 MiB; 26 checkpoints of 2,304 bfloat16 a token 7,488 MiB."""
    cells = table_contents(project, "cce_tableA3", []).cells
    row = [cells["Gemma 2 (2B)", c].regenerated for c in ("Logits (MB)", "Activations (MB)", "Weights+Opt+Grad (MB)")]
    assert row == ["64000", "7488", "19946"]


def test_a_model_whose_state_alone_is_too_large_has_no_batch_and_an_unknown_one_no_number(paper):
    model = paper.models["Llama 3 (70B)"]
    tiny = Setup(gpus=1, usable_gib=75, state_bytes=8, activation_bytes=2, logit_bytes=4, tokens=1)
    assert quantities(model, tiny)["before"] == 0 and quantities(model, tiny)["increase"] is None
    unknown = quantities(model.model_copy(update={"elements": None}), tiny)
    assert unknown["state"] is unknown["before"] is unknown["total"] is None and unknown["logits"] == 4 * 128256


BUFFERS = {
    "GPT 2": 12 * 1024**2, "GPT Neo (1.3B)": 12 * 2048**2, "GPT Neo (2.7B)": 16 * 2048**2, "Llama 2 (7B)": 32 * 64,
}  # fmt: skip


def test_the_elements_of_every_model_are_those_of_its_architecture_and_stored_buffers(paper):
    import torch
    import transformers as t

    def llama(kind, width, inner, layers, heads, kv_heads, vocab, **more):
        return kind(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocab, **more,
        )  # fmt: skip

    def neo(width: int, layers: int) -> t.GPTNeoConfig:
        kinds = [[["global", "local"], layers // 2]]
        return t.GPTNeoConfig(hidden_size=width, num_layers=layers, num_heads=width // 128, attention_types=kinds)

    untied = {"tie_word_embeddings": False}
    configs = {
        "GPT 2": t.GPT2Config(),
        "GPT Neo (1.3B)": neo(2048, 24),
        "GPT Neo (2.7B)": neo(2560, 32),
        "Gemma (2B)": llama(t.GemmaConfig, 2048, 16384, 18, 8, 1, 256000, head_dim=256),
        "Gemma 2 (2B)": llama(t.Gemma2Config, 2304, 9216, 26, 8, 4, 256000, head_dim=256),
        "Gemma 2 (9B)": llama(t.Gemma2Config, 3584, 14336, 42, 16, 8, 256000, head_dim=256),
        "Gemma 2 (27B)": llama(t.Gemma2Config, 4608, 36864, 46, 32, 16, 256000, head_dim=128),
        "Llama 2 (7B)": llama(t.LlamaConfig, 4096, 11008, 32, 32, 32, 32000, **untied),
        "Llama 2 (13B)": llama(t.LlamaConfig, 5120, 13824, 40, 40, 40, 32000, **untied),
        "Llama 3 (8B)": llama(t.LlamaConfig, 4096, 14336, 32, 32, 8, 128256, **untied),
        "Llama 3 (70B)": llama(t.LlamaConfig, 8192, 28672, 80, 64, 8, 128256, **untied),
        "Mistral 7B": llama(t.MistralConfig, 4096, 14336, 32, 32, 8, 32000, **untied),
        "Mixtral 8x7B": llama(t.MixtralConfig, 4096, 14336, 32, 32, 8, 32000, **untied),
        "Phi 1.5": llama(t.PhiConfig, 2048, 8192, 24, 32, 32, 51200, **untied),
        "Phi 3 Medium": llama(t.Phi3Config, 5120, 17920, 40, 40, 10, 32064, **untied),
        "Phi 3.5 Mini": llama(t.Phi3Config, 3072, 8192, 32, 32, 32, 32064, **untied),
        "Qwen 1.5 (7B)": llama(t.Qwen2Config, 4096, 11008, 32, 32, 32, 151936, **untied),
    }
    assert list(configs) == paper.tables["cce_tableA3"].models
    for name, config in configs.items():
        with torch.device("meta"):
            model = t.AutoModelForCausalLM.from_config(config)
        elements = sum(p.numel() for p in model.parameters()) + BUFFERS.get(name, 0)
        shape = (config.vocab_size, config.hidden_size, config.num_hidden_layers)
        declared = paper.models[name]
        assert (declared.elements, declared.vocab, declared.width, declared.layers) == (elements, *shape), name


def test_counts_print_with_three_digits():
    values = (5_866_190, 69_845_595, 99_460_000, 396_600, 999, 1.5e9)
    assert [three_digits(v) for v in values] == ["5.87M", "69.8M", "99.5M", "397K", "999", "1.50B"]
    assert (number("11.9x"), half_a_digit("11.9x")) == (11.9, pytest.approx(0.05))


def test_arithmetic_is_the_same_at_every_scale_and_its_claims_are_always_judged():
    rows = {}
    for scale in ("smoke", "paper"):
        project = Project({"scale": scale})
        contents = table_contents(project, "cce_tableA3", [])
        rows[scale] = {r["claim"]: r["verdict"] for r in claim_rows(project, "cce_tableA3", contents) if not r["part"]}
    assert rows["smoke"] == rows["paper"]
    assert list(rows["paper"].values()) == ["holds", "holds", "holds", "fails"], "the caption's 1.5x is not met"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["columns"]["Increase"].update(quantity="increse"), "unknown quantity 'increse'; did you mean"),
        (lambda t: t["constants"].pop("gpus"), "constants: gpus is missing"),
        (lambda t: t["models"].append("GPT 3"), "unknown model 'GPT 3'; did you mean 'GPT 2'"),
        (lambda t: t.update(kind="arithmetics"), "cce_tableA3.kind: unknown kind 'arithmetics'; did you mean"),
        (lambda t: t.pop("kind"), "cce_tableA3.kind is missing"),
        (lambda t: t.update(colums={}), "tables.cce_tableA3: unknown key 'colums'; did you mean 'columns'"),
        (lambda t: t["columns"].pop("Increase"), "column 'Increase' is printed but not declared"),
        (lambda t: t["columns"]["Width"].pop("printed"), "column 'Width' is declared but not printed"),
    ],
)
def test_a_mistake_in_a_table_of_arithmetic_is_refused_with_the_fix(tmp_path, edit, message):
    root = edited(tmp_path, "cce", lambda p: edit(p["tables"]["cce_tableA3"]))
    with pytest.raises(SpecError, match=message):
        table_contents(Project({}, root), "cce_tableA3", [])


# -- figures ----


@pytest.mark.parametrize("name", ["cce_figure1a", "cce_figure1b", "cce_figure2"])
def test_a_figure_is_written_as_svg_png_csv_and_notes_and_twice_the_same(tmp_path, name):
    project = Project({})
    written = []
    for folder in ("a", "b"):
        write_figure(project, name, [], tmp_path / folder / f"{name}.svg")
        written.append({p.suffix: p.read_bytes() for p in (tmp_path / folder).iterdir()})
    assert set(written[0]) == {".svg", ".png", ".csv", ".txt"} and written[0] == written[1]
    assert written[0][".png"].startswith(b"\x89PNG") and written[0][".svg"].startswith(b"<?xml")
    assert len(list(csv.DictReader(written[0][".csv"].decode().splitlines()))) > 10


def test_the_bars_of_figure_one_fill_the_cards_and_the_logits_have_the_quoted_shares():
    """Quoted, of the memory that a token takes, to about a percent: 40, 65 and 89 %."""
    project = Project({})
    for logits in (True, False):
        rows = numbers(project, "cce_tableA3", logits)
        assert len(rows) == 34
        for row in rows:
            assert row["state_gib"] + row["activations_gib"] + row["logits_gib"] == pytest.approx(1200, rel=1e-4), row
    shares = {
        r["model"]: r["logits_gib"] / (r["logits_gib"] + r["activations_gib"])
        for r in numbers(project, "cce_tableA3", True)
    }
    quoted = {"Phi 3.5 Mini": 0.40, "Llama 3 (8B)": 0.65, "Gemma 2 (2B)": 0.89}
    assert {name: shares[name] for name in quoted} == pytest.approx(quoted, abs=0.0125)


def test_bars_are_multiples_of_one_product_and_of_the_lower_bound(project, paper, tmp_path):
    bench = Bench(paper).add("ours", "time", 24.46, measure="both", over_floor=2.0)
    bench.add("ours", "peak_memory", 2 * 1161.0, measure="both")
    rows = bench.write(tmp_path)
    found = bars(project, "cce_table1_bars", table_contents(project, "cce_table1", rows))
    rows_drawn = {(row, quantity): value for _, row, quantity, value, _ in found}
    assert rows_drawn == {  # row 8 is the same method
        (row, quantity): pytest.approx(2.0)
        for row in ("1b) Our default", "8) CCE-Kahan")
        for quantity in ("time", "memory")
    }
    write_figure(project, "cce_table1_bars", rows, tmp_path / "bars.svg")
    assert "proxies" not in (tmp_path / "bars.csv").read_text(), "an operation is no model"
    drawn = list(csv.DictReader((tmp_path / "bars.csv").read_text().splitlines()))
    assert [float(row["value"]) for row in drawn] == [2.0] * 4


def test_bars_of_other_inputs_than_the_papers_say_so_and_those_of_its_own_do_not(project, paper, tmp_path):
    on_a_cpu = Bench(paper, "tiny_cpu", "cpu (a processor, 1 thread)").add("eager", "peak_memory", 12.0, measure="both")
    write_figure(Project({"scale": "tiny"}), "cce_table1_bars", on_a_cpu.write(tmp_path), tmp_path / "tiny.svg")
    said = (tmp_path / "tiny.notes.txt").read_text().splitlines()
    assert said[0] == "not comparable at this scale: measured on other inputs than the paper's, on a CPU"
    assert said[1] == "on a CPU, 1024 tokens, 32768 ids, width 128"
    assert said[0][:40] in (tmp_path / "tiny.svg").read_text()
    on_a_card = Bench(paper).add("ours", "peak_memory", 12.0, measure="both").write(tmp_path)
    write_figure(project, "cce_table1_bars", on_a_card, tmp_path / "gpu.svg")
    assert "comparable" not in (tmp_path / "gpu.notes.txt").read_text()


def test_a_figure_without_a_measurement_says_so_and_has_no_numbers(tmp_path):
    write_figure(Project({}), "cce_tableA2_bars", [], tmp_path / "bars.svg")
    assert (tmp_path / "bars.csv").read_text() == "case,row,quantity,value,labels\n"


def test_both_deviations_are_printed_under_figure_one():
    text = " ".join(notes(Project({}), "cce_figure1a", Drawing(None, None)))
    assert "not a measurement" in text and "float32 copy of the weights" in text and "all 17 models" in text


def test_ours_updates_nothing_in_turn_and_writes_the_gradients_once():
    found = {s: [a for a in accesses(8192, 256_000, 2304, 0.26) if a.scheme == s] for s in (PUBLISHED, OURS)}
    assert {a.tensor for a in found[PUBLISHED] if a.mode == UPDATE} == {
        "target logit", "LSE", "mean logit", "dE", "dC",
    }  # fmt: skip
    assert not [a for a in found[OURS] if a.mode == UPDATE]
    gradients = sum(a.bytes for a in found[OURS] if a.tensor in ("dE", "dC"))
    assert gradients == gradient_bytes(8192, 256_000, 2304)
    added = sum(a.bytes for a in found[PUBLISHED] if a.tensor in ("dE", "dC"))
    # 26 % of 64 x 2000 tiles, each adding 128 rows of dE and of dC: read and written.
    assert added == pytest.approx(0.26 * 64 * 2000 * 2 * 128 * 2304 * 2 * 2)


def test_an_unknown_kind_of_figure_is_refused(tmp_path):
    root = edited(tmp_path, "cce", lambda p: p["figures"]["cce_figure2"].update(draw="access_pattern"))
    with pytest.raises(SpecError, match="draw: unknown figure 'access_pattern'; did you mean 'access_patterns'"):
        open_project({}, root)


def test_a_written_table_has_its_diff_claims_and_page(tmp_path):
    out = tmp_path / "cce_tableA3.csv"
    write_table(Project({}), "cce_tableA3", [], out, tmp_path / "html")
    rows = list(csv.reader(out.read_text().splitlines()))
    assert rows[0][:3] == ["scale", "Model", "Logits (MB)"] and len(rows) == 18
    assert rows[1][6:9] == ["5.87M", "69.8M", "11.9x"]
    assert len(list(csv.DictReader(sibling(out, "diff").read_text().splitlines()))) == 17 * 11
    claims = list(csv.DictReader(sibling(out, "claims").read_text().splitlines()))
    assert len([row for row in claims if not row["part"]]) == 4 and len(claims) == 4 + 9 + 17
    page = (tmp_path / "html/cce_tableA3.html").read_text()
    assert "Phi 3 Medium" in page and "not found" in page and "<script" not in page
