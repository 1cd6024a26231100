"""Exhibits of BitNet a4.8: settings against the paper's specification, shared trunks, cells that a theory fixes."""

from __future__ import annotations

import csv
import dataclasses
import math

import pytest
from support_bitnet_exhibits import jobs, models
from support_tables import edited, pretrained, record_of

from paperlm.checks import open_project
from paperlm.data.registry import tokenizer_entry
from paperlm.errors import SpecError
from paperlm.figures.base import exhibit_contents
from paperlm.figures.quantized_blocks import projections, written
from paperlm.figures.series_curves import SAME, curve_samples, curve_statistics, draw
from paperlm.models.sizes import block_weights
from paperlm.plan.project import Project
from paperlm.quantizers.presets import PRESETS
from paperlm.record.record import write_record
from paperlm.result import Series
from paperlm.tables.build import table_contents, write_table
from paperlm.tables.claims import CellSamples
from paperlm.tables.jobs import labels
from paperlm.tables.results import collect
from paperlm.tables.verdicts import claim_rows
from paperlm.train.schedule import rate_and_decay

SCALES = ["smoke", "tiny", "gpu", "paper"]


@pytest.fixture(scope="module")
def paper() -> Project:
    return Project({"scale": "paper"})


# -- settings ----


def test_the_published_hyper_parameters_are_ours_to_the_digit(paper):
    """Tables 6 and 7: sizes, batch, tokens, both rates and weight decays, warm-up, Adam's betas."""
    for name, cells in (("bitnet_table6", 28), ("bitnet_table7", 32)):
        diff = table_contents(paper, name, []).diff
        assert [(d.row, d.column, d.published, d.regenerated) for d in diff if d.verdict != "match"] == []
        assert len(diff) == cells
    found = table_contents(paper, "bitnet_table7", []).cells
    assert found["BitNet a4.8, 3B", "Learning Rate"].regenerated == "1.2e-3 → 6.4e-4"
    assert found["LLaMA LLM, 700M", "Weight Decay"].regenerated == "0.1"


@pytest.mark.parametrize("scale", SCALES)
def test_texts_begin_with_bos_at_the_published_scale_and_where_eos_stands_for_it_that_is_said(scale):
    project = Project({"scale": scale})
    asked = [model for name in ("bitnet_table1", "bitnet_table4") for model in models(project, name).values()]
    trained = [one for model in asked for one in (model, *model.ancestors()) if one.kind == "pretrain"]
    ((name, example),) = {(one.tokenizer, one.example) for one in trained}
    said = [d for d in project.papers["bitnet"].deviations if "stands where a beginning-of-sequence" in d.what]
    here = [d for d in said if not d.scales or scale in d.scales]
    assert (tokenizer_entry(name).bos is None) == bool(here) == (scale != "paper")
    assert example == "packed_bos"
    begins = {job.begin for job in jobs(project, "bitnet_table1").values() if job.kind == "lm_eval"}
    assert begins == ({"tokenizer"} if scale == "gpu" else {"bos"})


@pytest.mark.parametrize(("size", "millions"), [("700M", 679.5), ("1.3B", 1207.8), ("3B", 3221.5), ("7B", 6476.0)])
def test_a_model_has_as_many_weights_in_its_blocks_as_the_specification_counts(paper, size, millions):
    found = models(paper)[f"LLaMA LLM, {size}"]
    count = block_weights(found.hidden_size, found.intermediate_size, found.n_layers)
    assert round(count / 1e6, 1) == millions and found.global_batch * found.seq_len == 2**20


def test_rates_of_the_trunk_are_those_read_off_the_authors_plot(paper):
    """Update -> rate of the 700M run, four digits."""
    trunk = models(paper)["BitNet a4.8, 700M"].of
    for update, rate in ((400, 1.49962e-3), (49_950, 7.6851e-4), (50_050, 5.1634e-4), (95_000, 7.868e-5)):
        assert rate_and_decay(update, trunk)[0] == pytest.approx(rate, rel=1e-4)
    assert [rate_and_decay(update, trunk)[1] for update in (49_999, 50_000)] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("figure", "size"), [("bitnet_figure4", "700M"), ("bitnet_figure5", "1.3B"), ("bitnet_figure6", "3B")]
)
def test_a_run_in_phase_a_alone_has_the_rates_of_the_whole_schedule(paper, figure, size):
    """Its line ends elsewhere, so that the same update has the same rate as in 100,000 updates."""
    trunk = models(paper)[f"BitNet a4.8, {size}"].of
    for (row, _), job in jobs(paper, figure).items():
        assert job.quantization["weight"]["name"] == "ternary_absmean" and job.sub_norm
        for update in (1, 374, 375, 10_000, job.steps - 1):
            ours, whole = rate_and_decay(update, job), rate_and_decay(update, trunk)
            assert ours == pytest.approx(whole, rel=1e-5), (row, update)


def test_every_arm_of_the_specification_is_a_job_with_its_preset(paper):
    found = {}
    for name in ("bitnet_table1", "bitnet_table4"):
        trained = {row: model for row, model in models(paper, name).items() if model.kind != "hub_model"}
        for row, model in trained.items():
            own = model.settings()
            found[row] = (own.quantization, own.sub_norm, own.hidden_act)
    for name in ("bitnet_figure4", "bitnet_figure5", "bitnet_figure6"):
        for (row, _), job in jobs(paper, name).items():
            found[row] = (job.quantization, job.sub_norm, job.hidden_act)
    expected = {
        "LLaMA LLM, 3B": "llama", "BitNet b1.58, 3B": "b158", "A8 trunk, 3B": "a8_trunk", "BitNet a4.8, 3B": "a48_int4",
        "BitNet a4.8 (FP4), 3B": "a48_fp4", "INT8, -": "a48_no_topk", "INT8, TopK 50%": "a48_int4",
        "Hybrid (a4.8)": "a48_int4", "Full FP4": "full_fp4", "Full INT4": "full_int4", "INT8 + ReLU²": "f5_int8_relu2",
        "INT8 + Swish": "f5_int8_silu", "FP4 + ReLU²": "f5_fp4_relu2", "INT4 + ReLU²": "f5_int4_relu2",
        "INT4 absmean": "f6_int4_absmean", "INT4 absmax": "f6_int4_absmax", "FP4 E2M1": "f6_e2m1",
        "FP4 E1M2": "f6_e1m2",
    }  # fmt: skip
    for row, preset in expected.items():
        wanted = PRESETS[preset]
        assert found[row] == (wanted["quantization"], wanted["sub_norm"], wanted["hidden_act"]), row


# -- jobs that exhibits share ----


@pytest.mark.parametrize("scale", SCALES)
def test_all_branches_of_a_size_leave_one_trunk_at_95_percent_of_its_updates(scale):
    project = Project({"scale": scale})
    found = models(project) | models(project, "bitnet_table4")
    for size in ("700M", "1.3B", "3B", "7B"):
        trunk = found[f"A8 trunk, {size}"]
        branches = [found[f"BitNet a4.8, {size}"], found[f"BitNet a4.8 (FP4), {size}"]]
        branches += [found["INT8, -"]] if size == ("700M" if scale == "gpu" else "3B") else []
        assert {branch.of.job_id for branch in branches} == {trunk.job_id}
        assert {branch.at for branch in branches} == {round(0.95 * trunk.steps)}
        assert trunk.hidden_act == "relu2" and found[f"BitNet b1.58, {size}"].hidden_act == "silu"


@pytest.mark.parametrize("scale", SCALES)
def test_rows_that_the_paper_prints_twice_are_one_job(scale):
    project = Project({"scale": scale})
    one, three, four = (jobs(project, f"bitnet_table{n}") for n in (1, 3, 4))
    of_3b = "700M" if scale == "gpu" else "3B"  # there one proxy does for what tables 3 and 4 show of 3B
    for column in ("ARCc↑", "WGe↑"):
        assert one[f"BitNet a4.8, {of_3b}", column].job_id == three["BitNet a4.8, 3B", column].job_id
        assert one[f"BitNet a4.8, {of_3b}", column].job_id == four["INT8, TopK 50%", column].job_id
    assert one[f"BitNet a4.8, {of_3b}", "PPL↓"].job_id == three["BitNet a4.8, 3B", "PPL"].job_id
    switch = jobs(project, "bitnet_switch")
    for size in ("700M", "7B"):
        assert switch[f"{size}, a4.8", "At the end"].job_id == one[f"BitNet a4.8, {size}", "PPL↓"].job_id
        branch = switch[f"{size}, a4.8", "Right behind the switch"]
        assert branch.at == branch.of.at and branch.snapshot("of") == branch.of.at
    two, figure = jobs(project, "bitnet_figure2"), jobs(project, "bitnet_figure3")
    assert {job.job_id for job in two.values()} == {job.job_id for job in figure.values()}


# -- cells that a theory fixes ----


def sparsity(job, **shares: float):
    """A made-up record of zeros."""
    metrics = dict.fromkeys(job.metrics(), 0.0) | shares
    errors = {name: 0.0001 for name in ("qkv", "gate", "up", "down", "overall")}
    errors |= dict.fromkeys(("out", "theory/qkv", "theory/out", "theory/gate"), 0.0)
    return record_of(job, metrics, standard_errors=errors)


def zeros_of(folder, project, **shares: float):
    """Records of Table 2: `shares` of the a4.8 rows, nothing of the others."""
    paths = []
    for row, job in {row: job for (row, _), job in jobs(project, "bitnet_table2").items()}.items():
        paths.append(folder / f"{job.job_id}.json")
        write_record(paths[-1], sparsity(job, **(shares if row.startswith("BitNet a4.8") else {})))
    return paths


def test_what_theory_predicts_is_compared_with_the_print_at_every_scale(tmp_path, tiny):
    files = zeros_of(tmp_path, tiny, qkv=0.1189, out=0.5, gate=0.1249, up=0.66, down=0.8, overall=0.42)
    cells = table_contents(tiny, "bitnet_table2", files).cells
    found = {key: (cell.verdict, cell.difference) for key, cell in cells.items()}
    assert found["BitNet a4.8, 390M", "QKV"] == ("within 0.3", "-0.21")
    assert found["BitNet a4.8, 390M", "Out"] == ("match", "+0")
    assert found["BitNet a4.8, 390M", "Gate"] == ("differs", "+0.39")
    assert found["BitNet a4.8, 390M", "Down"][0] == "not comparable at this scale"
    assert found["LLaMA LLM, 679M", "Down"] == ("match", "+0")
    assert found["BitNet b1.58, 638M", "QKV"] == ("differs", "-1.2"), "its records here have none"
    assert found["BitNet a4.8, 390M", "Activated (M)"][0] == "not printed"


def test_exactly_half_is_exactly_half_and_a_theory_is_a_number_without_noise(tmp_path, tiny):
    theory = {"theory/qkv": 0.1199, "theory/out": 0.5, "theory/gate": 0.1199}
    files = zeros_of(tmp_path, tiny, qkv=0.1199, out=0.5, gate=0.121, overall=0.425, **theory)
    contents = table_contents(tiny, "bitnet_table2", files)
    verdicts = {row["claim"]: row["verdict"] for row in claim_rows(tiny, "bitnet_table2", contents) if not row["part"]}
    assert verdicts["BIT-T2-3"] == verdicts["BIT-T2-4"] == verdicts["BIT-T2-4t"] == "holds"
    assert verdicts["BIT-T2-1"] == "holds" and verdicts["BIT-T2-6"] == "fails"
    assert verdicts["BIT-T2-9m"] == "not tested"
    one_off = tmp_path / "one_off"
    one_off.mkdir()
    files = zeros_of(one_off, tiny, qkv=0.1199, out=0.4999, gate=0.125, **theory)
    contents = table_contents(tiny, "bitnet_table2", files)
    verdicts = {row["claim"]: row["verdict"] for row in claim_rows(tiny, "bitnet_table2", contents) if not row["part"]}
    assert verdicts["BIT-T2-3"] == verdicts["BIT-T2-4"] == verdicts["BIT-T2-4t"] == "fails"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"rows": ["BitNet a4.8, 390"]}, r"predicted\[0\]: unknown row 'BitNet a4.8, 390'; did you mean"),
        ({"columns": ["QVK"]}, r"predicted\[0\]: unknown column 'QVK'; did you mean 'QKV'"),
        ({"within": 0}, "greater than 0"),
    ],
)
def test_a_prediction_names_cells_that_exist(tmp_path, part, message):
    root = edited(tmp_path, "bitnet", lambda p: p["tables"]["bitnet_table2"]["predicted"][0].update(part))
    with pytest.raises(SpecError, match=message):
        open_project({"scale": "tiny"}, root)


def test_a_column_may_have_another_factor_than_its_table(tmp_path, tiny):
    cells = {(c.row, c.column): c for c in tiny.cells("bitnet_table1") if c.row == "LLaMA LLM, 700M"}
    ppl, tasks = (cells["LLaMA LLM, 700M", column].jobs[0] for column in ("PPL↓", "WGe↑"))
    shares = {metric: 0.25 for metric in tasks.metrics()}
    for job, metrics in ((ppl, {"perplexity": 90.5}), (tasks, shares)):
        write_record(tmp_path / f"{job.job_id}.json", record_of(job, metrics))
    found = table_contents(tiny, "bitnet_table1", sorted(tmp_path.iterdir())).cells
    shown = {column: found["LLaMA LLM, 700M", column].regenerated for _, column in cells}
    assert (shown["PPL↓"], shown["WGe↑"], shown["Avg↑"]) == ("90.50", "25.00", "25.00")


# -- tables that nothing is run for ----


def test_table_five_is_not_run_with_its_reason_and_shows_the_shape_that_is_assumed(tmp_path, tiny):
    write_table(tiny, "bitnet_table5", [], tmp_path / "bitnet_table5.csv")
    with (tmp_path / "bitnet_table5.diff.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    results = [row for row in rows if row["published"]]
    assert len(results) == 18 and {row["verdict"] for row in results} == {"not run"}
    assert all(row["regenerated"] == "not run" and "2T tokens" in row["reason"] for row in results)
    shape = {(row["row"], row["column"]): row["regenerated"] for row in rows if not row["published"]}
    assert shape["BitNet a4.8 2B", "Hidden Size"] == "2560" and shape["BitNet a4.8 2B", "GLU"] == "relu2"
    assert shape["BitNet b1.58 2B", "GLU"] == "silu"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update(sizes=["bitnet_3B"]), "give `sizes`, a row each, or `rows`"),
        (lambda t: t.pop("rows"), "give `sizes`, a row each, or `rows`"),
        (lambda t: t["columns"]["HS"].update(setting="hidden_size"), "give `setting`, or `not_run`"),
        (lambda t: t["columns"]["HS"].update(in_print=False), "neither printed nor made says nothing"),
        (lambda t: t["rows"]["BitNet a4.8 2B"].update(job="trnuk"), "unknown job 'trnuk'; did you mean 'trunk'"),
        (lambda t: t["rows"]["BitNet a4.8 2B"].update(size="bitnet_2b"), "unknown size 'bitnet_2b'; did you mean"),
        (lambda t: t["columns"]["Layers"].update(setting="n_layer"), "unknown setting 'n_layer'; did you mean"),
    ],
)
def test_mistakes_in_a_table_of_settings_are_named(tmp_path, edit, message):
    root = edited(tmp_path, "bitnet", lambda p: edit(p["tables"]["bitnet_table5"]))
    with pytest.raises(SpecError, match=message):
        open_project({"scale": "tiny"}, root)


# -- a job of another kind in the place of one ----


def test_a_continued_run_can_stand_where_a_pretraining_does(tiny):
    found = models(tiny)
    assert found["LLaMA LLM, 3B"].kind == "pretrain" and found["BitNet a4.8, 3B"].kind == "continue_pretrain"


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ({"llama": "ppl"}, "'ppl' is a job of kind 'text_perplexity'; in place of 'llama' it has to be"),
        ({"trunk": "a48_int4"}, r"'a48_int4' is a job of kind 'continue_pretrain'; in place of 'trunk' it has to be"),
        ({"f4_hybrid": "a48_int4"}, "in place of 'f4_hybrid' it has to be 'pretrain'"),
    ],
)
def test_a_job_that_its_children_could_not_work_on_is_refused(tmp_path, instead, message):
    row = "BitNet a4.8, 3B"
    root = edited(tmp_path, "bitnet", lambda p: p["tables"]["bitnet_table1"]["rows"][row].update(instead=instead))
    with pytest.raises(SpecError, match=message):
        open_project({"scale": "tiny"}, root)


def test_a_job_cannot_take_the_place_of_what_it_works_on(tmp_path):
    """Resolving it would never end."""

    def edit(content: dict) -> None:
        content["jobs"]["tuned"] = {"kind": "sft", "of": "llama"}
        content["tables"]["bitnet_table1"]["rows"]["BitNet a4.8, 3B"]["instead"] = {"llama": "tuned"}

    root = edited(tmp_path, "bitnet", edit)
    with pytest.raises(SpecError, match="'tuned' works on 'llama' itself, which it cannot take the place of"):
        open_project({"scale": "tiny"}, root)


# -- figures ----


def test_figure_one_has_the_quantizers_of_the_models_that_are_trained(paper):
    """Its numbers against the settings of the jobs themselves."""
    trained = {"llama": "LLaMA LLM, 7B", "b158": "BitNet b1.58, 7B", "a48_int4": "BitNet a4.8, 7B"}
    for preset, row in trained.items():
        quantization = models(paper)[row].settings().quantization
        places = ("qkv", "o", "gate_up", "down")
        for place, (_, weights, name, bits, keep) in zip(places, projections(preset), strict=True):
            own = (quantization or {}).get(place)
            assert (name, keep) == ((own["name"], own.get("keep", 1.0)) if own else ("none", 1.0))
            assert bits == (16 if own is None else 8 if name.startswith("int8") else 4)
            assert weights == ("ternary_absmean" if quantization else "16 bits")
    assert written({"name": "int8_absmax", "keep": 0.5}) == ["TopK 50 %", "INT8 absmax"]
    assert written({"name": "fp4_e2m1"}) == ["FP4 E2M1"] and written(None) == []
    assert written({"name": "int4_absmean", "multiple": 2}) == ["INT4 absmean x 2"]


def whole(project, name, contents):
    return {row["claim"]: row["verdict"] for row in claim_rows(project, name, contents) if not row["part"]}


def test_claims_on_the_configuration_hold_of_ours_and_fail_of_another(tiny, monkeypatch):
    for name, claims in (("bitnet_table6", ["BIT-T6-1"]), ("bitnet_table7", ["BIT-T7-1"])):
        contents = table_contents(tiny, name, [])
        assert whole(tiny, name, contents) == dict.fromkeys(claims, "holds")
    other = {**contents.samples, ("LLaMA LLM, 7B", "Warm-up"): CellSamples((376.0,))}
    assert whole(tiny, "bitnet_table7", dataclasses.replace(contents, samples=other)) == {"BIT-T7-1": "fails"}
    shapes = table_contents(tiny, "bitnet_table6", [])
    other = {**shapes.samples, ("3B", "GLU Size"): CellSamples((8000.0,))}
    assert whole(tiny, "bitnet_table6", dataclasses.replace(shapes, samples=other)) == {"BIT-T6-1": "fails"}
    blocks = "bitnet_figure1"
    assert set(whole(tiny, blocks, exhibit_contents(tiny, blocks, [])).values()) == {"holds"}
    mixed = PRESETS["a48_int4"]["quantization"] | {"o": {"name": "int8_absmax"}, "down": {"name": "int4_absmean"}}
    monkeypatch.setitem(PRESETS, "a48_int4", PRESETS["a48_int4"] | {"quantization": mixed})
    assert whole(tiny, blocks, exhibit_contents(tiny, blocks, [])) == {"BIT-F1-1": "fails", "BIT-F1-2": "fails"}


def test_two_curves_are_the_same_if_every_point_is(tiny):
    """A fact about two records, so that no seed noise is in it; a point that differs in the last digit shows."""
    rows = {row: job for (row, _), job in jobs(tiny, "bitnet_figure6").items()}
    curve = [[n, 512 * n, 5.0 - n / 100] for n in range(1, 41)]
    found = {}
    for row, job in rows.items():
        points = [list(point) for point in curve]
        if row == "FP4 E2M1":
            points[-1][2] += 1e-6
        series = {"train": Series(columns=["update", "tokens", "loss"], rows=points)}
        found[row] = (record_of(job, {}, series=series),)
    options = tiny.figure("bitnet_figure6")[1].options | {"window": 1, "diverged": None}
    statistics = curve_statistics(found, options)
    assert statistics["FP4 E1M2"][0][SAME] == 1.0 and statistics["FP4 E2M1"][0][SAME] < 1.0
    sample = curve_samples(found, options, 0.03)["FP4 E1M2", SAME]
    assert sample.constant and sample.values == (1.0,)


def test_numbers_of_a_training_curve_say_update_bits_rate_decay_and_divergence(tmp_path, tiny):
    """Rates by the line itself: from the peak at the end of the warm-up to the end rate behind the last update."""
    files = []
    for (row, _), job in jobs(tiny, "bitnet_figure4").items():
        lost = 5.0 if row != "Full INT4" else 6.0  # from 4 up by 2 nats, and there to the end
        points = [[n, 512 * n, 4.0 if n <= 160 else lost - 1.5 * (row != "Full INT4")] for n in range(1, job.steps + 1)]
        files.append(tmp_path / f"{job.job_id}.json")
        made = pretrained(job, 60.0)
        curve = Series(columns=["update", "tokens", "loss"], rows=points)
        write_record(files[-1], made.model_copy(update={"series": {**made.series, "train": curve}}))
    found = draw(tiny, "bitnet_figure4", files).numbers
    last = found[found["update"] == job.steps].set_index("row")
    assert last["bits"]["Full INT4"] == pytest.approx(6 / math.log(2))
    assert last["diverged"].to_dict() == {"Hybrid (a4.8)": False, "Full FP4": False, "Full INT4": True}
    per_update = (job.peak_lr - job.end_lr) / (job.steps - job.warmup_steps)
    assert last["learning_rate"].tolist() == pytest.approx([job.end_lr + per_update] * 3)
    assert set(found["weight_decay"]) == {0.1} and found["learning_rate"].min() == 0


def test_a_row_of_ours_has_its_name_and_size_in_the_columns_of_the_printed_ones(tmp_path, tiny):
    write_table(tiny, "bitnet_table1", [], tmp_path / "t.csv")
    lines = list(csv.reader((tmp_path / "t.csv").open()))
    assert lines[0][:3] == ["scale", "Models", "Size"]
    assert ["tiny", "BitNet a4.8", "7B"] in [line[:3] for line in lines]
    assert ["tiny", "A8 trunk", "7B"] in [line[:3] for line in lines]
    write_table(tiny, "bitnet_table3", [], tmp_path / "t.csv")
    names = [line[1:3] for line in csv.reader((tmp_path / "t.csv").open())]
    assert ["w/ 4-bit Q, 3-bit KV (position 0 too)", "3B"] in names, "a comma within a name is part of it"


def test_a_label_of_a_record_stands_beside_its_cell(tmp_path, tiny):
    job = jobs(tiny, "bitnet_table1")["LLaMA LLM, 700M", "PPL↓"]
    write_record(tmp_path / "one.json", record_of(job, {"perplexity": 90.0}, labels=["its tokenizer has no BOS"]))
    cell = collect(tiny, "bitnet_table1", [tmp_path / "one.json"]).cells["LLaMA LLM, 700M", "PPL↓"]
    assert labels(cell) == ["its tokenizer has no BOS"]
