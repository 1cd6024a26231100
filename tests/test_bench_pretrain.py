"""Throughput of training as an operation of the benchmark: both sides compute the same, and the table of the rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paperlm_kernels.bench import rows

from paperlm.bench import main, measure_case, with_ours
from paperlm.errors import SpecError

pretrain = with_ours().operation("pretrain")

from paperlm_kernels.bench.ops.pretrain import CASES  # noqa: E402 - found once the folder is among the operations'
from paperlm_kernels.bench.ops.pretrain.sides import ours, transformers_llama  # noqa: E402

CPU = torch.device("cpu")


def test_an_update_of_ours_is_an_update_of_transformers():
    """Given the same weights, one update of each leaves the same, whatever the micro-batch: so the same is timed."""
    case = dataclasses.replace(CASES["tiny"].small(), batch=4, seq_len=16)
    sides = [ours(case, 2, CPU, "cross_entropy"), ours(case, 4, CPU, "cce_exact"), transformers_llama(case, 2, CPU)]
    ids = torch.randint(2, case.vocab, (case.batch, case.seq_len), generator=torch.Generator().manual_seed(0))
    losses = []
    for side in sides:
        parameters = side.optimizer.param_groups[0]["params"]
        generator = torch.Generator().manual_seed(1)
        for parameter in parameters:  # the shapes of both models come in the same order
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
        side.optimizer.param_groups[0]["weight_decay"] = 0.0
        before = sum(side.loss(part) for part in ids.split(side.micro)).item()
        side.update(ids)
        losses.append((before, sum(side.loss(part) for part in ids.split(side.micro)).item()))
    for before, after in losses[1:]:
        assert before == pytest.approx(losses[0][0], rel=1e-5)
        assert after == pytest.approx(losses[0][1], rel=1e-5)
    assert losses[0][1] < losses[0][0]


def test_both_sides_are_measured_in_turns_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main([
        "pretrain", "--device", "cpu", "--scale", "small", "--methods", "ours,transformers", "--repeats", "1",
        "--warmup", "0", "--micro-batches", "1,2", "--out", str(out),
    ]) == 0  # fmt: skip
    mine, peer = rows.read(out)
    assert (mine["method"], mine["name"], peer["name"]) == ("ours", "ours", "transformers")
    assert peer["method"].startswith("transformers ") and peer["versions"]["transformers"] in peer["method"]
    for row in (mine, peer):
        assert (row["n"], row["metric"], row["unit"], row["scale"]) == (2, "throughput", "tokens/s", "small")
        assert row["shape"] == {"batch": 2, "seq_len": 128, "vocab": 1024, "dtype": "float32"}
        assert row["settings"]["micro_batch"] in (1, 2) and row["low"] <= row["value"] <= row["high"]
    assert "| tiny, 2 x 128, fp32 (small, to try the benchmark) |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "ours_cce_kahan"], "unknown method 'ours_cce_kahan'; did you mean 'ours_cce_exact'"),
        (["--cases", "tyny"], "unknown case 'tyny'; did you mean 'tiny'"),
        (["--micro-batches", "64,-1"], "--micro-batches '64,-1': give numbers of 1 or more"),
        (["--micro-batches", "3,5"], "--micro-batches 3,5: none divides the 16 sequences of tiny; name one that does"),
        (["--micro-batches", "16", "--scale", "small"], "none divides the 2 sequences of tiny"),
        (["--micro-batches", "3", "--cases", "documented"], "none divides the 512 sequences of 71M"),
    ],
)
def test_a_filtered_loss_and_other_wrong_arguments_are_refused(arguments, message, capsys):
    assert main(["pretrain", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_table_that_asks_for_an_unknown_operation_is_told_the_nearest(tmp_path):
    with pytest.raises(SpecError, match="unknown operation 'cros_entropy'; did you mean 'cross_entropy'"):
        measure_case("cros_entropy", "tiny_cpu", "", "cpu", "small", tmp_path / "rows.jsonl")


COMMON = {
    "op": "pretrain", "case": "71M", "metric": "throughput", "unit": "tokens/s", "device": "a card", "seed": 0,
    "versions": {"torch": "9.9"}, "date": "2030-01-01", "order": "natural", "scale": "full",
    "shape": {"batch": 512, "seq_len": 256, "vocab": 32000, "dtype": "bfloat16"},
}  # fmt: skip


def test_each_loss_of_ours_has_a_line_against_the_peer():
    values = {"ours": 300.0, "ours_cce_exact_kept": 330.0, "transformers": 200.0}
    found = [{**COMMON, "name": m, "method": m, "value": v, "low": v - 1, "high": v + 1} for m, v in values.items()]
    found[2]["method"] = "transformers 5.0"
    lost = {**COMMON, "name": "ours_cce_exact", "method": "ours_cce_exact", "metric": "outcome", "value": None}
    first, second, _, missing = pretrain.tables([*found, {**lost, "outcome": "failed: why"}]).splitlines()[2:]
    peer, place = "200 (199-201) (transformers 5.0)", "a card, torch 9.9, 2030-01-01"
    assert first == f"| 71M, 512 x 256, bf16 | 300 (299-301) | {peer} | 1.50 | {place} |"
    assert second.startswith("| 71M, 512 x 256, bf16, cce_exact_kept | 330 (329-331) |") and " 1.65 " in second
    assert missing == "Not measured on a card: ours_cce_exact (failed: why)."


def test_a_peer_of_another_day_or_another_pytorch_is_said_beside_the_ratio():
    values = {"value": 200.0, "low": 199.0, "high": 201.0}
    mine, peer = ({**COMMON, **values, "name": name, "method": name} for name in ("ours", "transformers"))
    for changed in ({"date": "2029-12-31"}, {"versions": {"torch": "8.8"}}):
        (line,) = pretrain.tables([mine, peer | changed]).splitlines()[2:]
        told = {"torch": "9.9"} | changed.get("versions", {})
        date = changed.get("date", "2030-01-01")
        assert line.endswith(f"| 1.00 | a card, torch 9.9, 2030-01-01; the peer: torch {told['torch']}, {date} |")
