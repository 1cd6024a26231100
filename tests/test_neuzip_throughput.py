"""Throughput of packing and unpacking from measurement rows: NeuZip's Figure 4 and the table of its numbers."""

from __future__ import annotations

import json
import math

import pandas
import pytest
from paperlm_kernels.bench.rows import append
from pydantic import ValidationError
from support_declarations import edit, refused
from support_tables import edited

from paperlm.errors import RecordError, SpecError
from paperlm.figures import measured_curves
from paperlm.figures.base import write_figure
from paperlm.figures.options import check_options
from paperlm.plan.measured import places
from paperlm.plan.project import Project
from paperlm.plan.table import CaseSpec
from paperlm.plan.workflow import Workflow
from paperlm.tables.build import table_contents

TABLE = "neuzip_throughput"
ON_A_CARD = Project({"scale": "gpu"})
SPEED = {"ours": 900.0, "ours_k3": 950.0, "offload pageable": 5.0, "bitsandbytes nf4": 400.0}


def written(folder, speeds=SPEED, weights=None, unit="us"):
    """Rows as the benchmark writes them: so many GB/s of bfloat16, both ways and at every size."""
    paper, table = ON_A_CARD.table(TABLE)
    lines = []
    for case in table.cases:
        count = weights or paper.cases[case].weights
        for name, speed in speeds.items():
            for measure in ("encode", "decode"):
                took = 2e-3 * count / speed
                lines.append({
                    "op": "neuzip", "case": case, "method": name, "name": name, "metric": "time", "unit": unit,
                    "value": took, "low": 0.99 * took, "high": 1.01 * took, "n": 50, "device": "NVIDIA H200",
                    "versions": {"torch": "2.11.0"}, "commit": "0", "date": "2026-01-01", "order": "natural",
                    "scale": "full", "seed": 0, "shape": {"weights": count}, "measure": measure, "gb_per_s": speed,
                })  # fmt: skip
    path = folder / "neuzip.jsonl"
    path.unlink(missing_ok=True)
    append(path, lines)
    return [path]


def verdicts(folder, speeds):
    write_figure(ON_A_CARD, "neuzip_figure4", written(folder, speeds), folder / "neuzip_figure4.svg")
    found = pandas.read_csv(folder / "neuzip_figure4.claims.csv")
    return dict(zip(found["claim"], found["verdict"], strict=False)) | {
        (claim, part): verdict
        for claim, part, verdict in zip(found["claim"], found["part"], found["verdict"], strict=True)
    }


def test_a_claim_on_times_of_two_measurements_says_so_and_one_on_times_of_one_does_not(tmp_path):
    """Here NF4 was measured on another day: what is said of NeuZip beside nvCOMP rests on one run all the same."""
    (path,) = written(tmp_path, SPEED | {"nvidia-nvcomp-cu13": 100.0, "dfloat11": 100.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    append(path, [line | ({"date": "2026-01-02"} if "nf4" in line["name"] else {}) for line in lines])
    write_figure(ON_A_CARD, "neuzip_figure4", [path], tmp_path / "neuzip_figure4.svg")
    found = pandas.read_csv(tmp_path / "neuzip_figure4.claims.csv").set_index(["claim", "part"])["reason"]
    whole = {claim: said for (claim, part), said in found.items() if not isinstance(part, str)}
    assert "times that were not measured in one run: 0 on 2026-01-01; 0 on 2026-01-02" in whole["NEU-F4-3"]
    assert "not measured in one run" not in whole["NEU-F4-4"]
    assert set(pandas.read_csv(tmp_path / "neuzip_figure4.csv")["run"]) == {"0 on 2026-01-01", "0 on 2026-01-02"}
    (said,) = (line for line in (tmp_path / "neuzip_figure4.notes.txt").read_text().splitlines() if " runs, " in line)
    assert said.endswith("; 0 on 2026-01-02 ('NF4')")


def test_a_point_is_gibibytes_of_bfloat16_a_second_over_the_bytes_of_the_matrix(tmp_path):
    write_figure(ON_A_CARD, "neuzip_figure4", written(tmp_path), tmp_path / "neuzip_figure4.svg")
    found = pandas.read_csv(tmp_path / "neuzip_figure4.csv")
    assert len(found) == 2 * 13 * len(SPEED) and set(found["device"]) == {"NVIDIA H200"}
    lossless = found[(found["row"] == "NeuZip, lossless") & (found["panel"] == "(a) compression")]
    assert lossless["bytes"].is_monotonic_increasing
    assert (lossless["bytes"].min(), lossless["bytes"].max()) == (100_000, 100_000_000)
    assert lossless["GiB/s of bfloat16"].tolist() == pytest.approx([900e9 / 2**30] * 13)


def test_no_line_is_drawn_across_sizes_that_were_not_measured(tmp_path):
    (path,) = written(tmp_path)
    some = {f"figure4_{n:02d}" for n in (0, 1, 2, 7, 12)}
    lines = [line for line in path.read_text().splitlines() if any(f'"{case}"' in line for case in some)]
    path.write_text("".join(f"{line}\n" for line in lines))
    drawn = measured_curves.draw(ON_A_CARD, "neuzip_figure4", [path])
    for axis in drawn.figure.axes:
        assert len(axis.lines) == len(SPEED)
        for line in axis.lines:
            there = [not math.isnan(x) and not math.isnan(y) for x, y in zip(*line.get_data(), strict=True)]
            assert there == [n in (0, 1, 2, 7, 12) for n in range(13)]
    assert len(drawn.numbers) == 2 * len(some) * len(SPEED), "the numbers are those that there are"


def test_a_line_is_whole_where_all_sizes_that_the_scale_asks_for_were_measured(tmp_path):
    drawn = measured_curves.draw(Project({"scale": "tiny"}), "neuzip_figure4", written(tmp_path))
    lines = [line for axis in drawn.figure.axes for line in axis.lines]
    assert len(lines) == 2 * len(SPEED)
    for line in lines:
        assert [round(bytes_) for bytes_ in line.get_xdata()] == [100_000, 316_228, 1_000_000, 3_162_278]
        assert not any(math.isnan(y) for y in line.get_ydata())


def test_claims_about_speeds_hold_where_they_are_as_the_paper_says_and_fail_where_the_host_is_fast(tmp_path):
    as_said = verdicts(tmp_path, SPEED)
    assert {as_said[name, "10 MB"] for name in ("NEU-F4-1", "NEU-F4-2", "NEU-F4-3")} == {"holds"}
    assert as_said["NEU-F4-4", "100 MB"] == "not tested", "no peer was measured"
    (tmp_path / "control").mkdir()
    control = verdicts(tmp_path / "control", SPEED | {"offload pageable": 2000.0, "bitsandbytes nf4": 1500.0})
    assert {control[name, "10 MB"] for name in ("NEU-F4-1", "NEU-F4-2", "NEU-F4-3")} == {"fails"}


def test_a_matrix_of_another_size_than_the_case_declares_is_refused(tmp_path):
    with pytest.raises(RecordError, match="figure4_00: measured as weights 77, declared as weights 50000"):
        table_contents(ON_A_CARD, TABLE, written(tmp_path, weights=77))


def test_sizes_are_those_that_the_benchmark_measures():
    from paperlm_kernels.bench.ops.neuzip.declared import CASES

    paper, table = ON_A_CARD.table(TABLE)
    assert {case: paper.cases[case].weights for case in table.cases} == {
        name: case.weights for name, case in CASES.items() if name.startswith("figure4_")
    }


def test_a_cpu_measures_small_matrices_and_judges_no_speed(tmp_path):
    project = Project({"scale": "tiny"})
    asked = [case for op, case in Workflow(project).measurements if op == "neuzip"]
    assert asked == [f"figure4_{index:02d}" for index in (0, 2, 4, 6)]
    contents = table_contents(project, TABLE, written(tmp_path))
    assert "only those on memory alone" in contents.untested
    assert contents.cells["100 MB: NeuZip, lossless", "Bits"].reason == "needs a GPU"
    assert contents.cells["1 MB: NeuZip, lossless", "Compression (GiB/s)"].labels.endswith("500000 weights, commit 0")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "give `tokens`, of a loss, `weights`, of a codec, or `sequences`, of an update"),
        ({"tokens": 8, "weights": 8}, "give `tokens`, of a loss, `weights`, of a codec, or `sequences`, of an update"),
        ({"weights": 8, "vocab": 100}, "are of a loss: leave them out without `tokens`"),
        ({"sequences": 2, "length": 9, "width": 4}, "are of a loss: leave them out without `tokens`"),
        ({"sequences": 2}, "sequences and length go together"),
        ({"weights": 8, "length": 9}, "sequences and length go together"),
    ],
)
def test_a_case_is_of_a_loss_of_a_codec_or_of_updates(fields, words):
    with pytest.raises(ValidationError, match=words):
        CaseSpec(model="a size", source="a test", **fields)


def test_a_column_that_the_table_does_not_have_is_refused_with_the_nearest_name(tmp_path):
    def misspelt(content):
        content["figures"]["neuzip_figure4"]["options"]["panels"] = {"a": "Compresion (GiB/s)"}

    project = Project({"scale": "tiny"}, edited(tmp_path, "neuzip", misspelt))
    with pytest.raises(SpecError, match=r"options.panels.a: .*did you mean 'Compression \(GiB/s\)'"):
        check_options(project, "neuzip_figure4")


def test_the_paper_s_kind_of_code_is_a_row_where_its_reference_can_be_measured(root):
    """It has no kernel: on a card the row could never get a number."""
    rows = {
        scale: {place.row.split(": ")[1] for place in places(Project({"scale": scale}), TABLE)}
        for scale in ("tiny", "gpu", "paper")
    }
    assert {scale for scale, found in rows.items() if "ANS" in found} == {"tiny"}
    assert rows["tiny"] - {"ANS"} == rows["gpu"] == rows["paper"]

    def row(spec):
        return spec["tables"][TABLE]["rows"]["ANS"]

    edit(root, "workflow/papers/neuzip.yaml", lambda spec: row(spec).update(scales=["tinny"]))
    refused(root, r"rows\.ANS\.scales: unknown scale 'tinny'; did you mean 'tiny'")
    edit(root, "workflow/papers/neuzip.yaml", lambda spec: row(spec).update(scales=["tiny"], printed=True))
    refused(root, r"rows\.ANS: .*say `printed: false`")
