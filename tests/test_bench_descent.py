"""The benchmark of descent: its methods make the same updates, and it says what a CPU cannot measure."""

from __future__ import annotations

import json

import pytest
import torch

from paperlm.bench import main, with_ours


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("descent") / "rows.jsonl"
    arguments = ["descent", "--device", "cpu", "--scale", "small", "--cases", "gpt_neo_2_7b", "--repeats", "1"]
    arguments += ["--updates", "3"]
    with_ours()
    from paperlm_kernels.bench.ops.descent import METHODS

    assert main([*arguments, "--methods", ",".join(METHODS), "--warmup", "0", "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_losses_of_packed_weights_are_those_of_lomo_to_the_last_bit_and_sgds_to_its_rounding(rows):
    losses = {r["method"]: r["exact"] for r in rows if r["metric"] == "loss"}
    assert losses["sgd"] == losses["lomo"] == losses["neuzip"] == losses["neuzip keep"] == losses["neuzip fix4"]
    vanilla, lomo = (torch.tensor(json.loads(losses[m])) for m in ("vanilla", "lomo"))
    torch.testing.assert_close(vanilla, lomo, rtol=2e-3, atol=0)  # bfloat16 keeps 2^-8
    assert len(set(lomo.tolist())) == 3  # it trains, on other text each time


def test_the_weights_behind_those_updates_have_one_hash_and_packed_ones_fewer_bits(rows):
    hashes = {r["method"]: r["value"] for r in rows if r["metric"] == "weights_hash"}
    assert hashes["sgd"] == hashes["lomo"] == hashes["neuzip"] == hashes["neuzip keep"] == hashes["neuzip fix4"] < 2**48
    bits = {r["method"]: r["value"] for r in rows if r["metric"] == "bits_per_weight"}
    assert bits["vanilla"] == bits["lomo"] == 16 and max(bits["neuzip"], bits["neuzip fix4"]) < 16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--text", "bundled:c4_sampel"], "did you mean 'c4_sample'"),
        (["--text", "local:wikitext2_test", "--local-data", "."], "nothing of it is to train on"),
        (["--text", "local:wikipedia_en"], "needs a folder"),
        (["--updates", "0"], "no whole number of 1 or more"),
    ],
)
def test_texts_and_numbers_that_cannot_be_used_are_refused_before_anything_is_measured(given, words, capsys):
    assert main(["descent", "--device", "cpu", "--scale", "small", *given]) == 2
    assert words in capsys.readouterr().err


def test_the_loss_is_that_of_the_same_update_however_many_are_timed(rows, tmp_path):
    out, arguments = tmp_path / "rows.jsonl", ["descent", "--device", "cpu", "--scale", "small", "--warmup", "1"]
    arguments += ["--cases", "gpt_neo_2_7b", "--methods", "lomo", "--repeats", "1", "--updates", "3", "--out", str(out)]
    assert main(arguments) == 0
    (again,) = (r for r in map(json.loads, out.read_text().splitlines()) if r["metric"] == "loss")
    (before,) = (r for r in rows if r["metric"] == "loss" and r["method"] == "neuzip")
    assert again["updates"] == before["updates"] == 3 and again["value"] == before["value"]
    assert again["exact"] == before["exact"] and not torch.are_deterministic_algorithms_enabled()


def test_memory_that_a_cpu_does_not_count_is_said_to_be_absent(rows):
    assert {r["method"] for r in rows if r["metric"] == "memory"} == set()
    said = [r for r in rows if r["metric"] == "outcome"]
    assert len(said) == 6 and all("on a GPU only" in r["outcome"] for r in said)


def test_a_cap_is_named_only_where_one_is_set(monkeypatch):
    with_ours()
    from paperlm_kernels.bench.operation import Task

    from paperlm.bench.ops.descent import updates

    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(updates, "fresh", full)
    operation = with_ours().operation("descent")
    (row,) = updates.rows_of(operation, Task("descent", "gpt_neo_2_7b", "lomo", ("update",), small=True, device="cpu"))
    assert row["outcome"] == "out of memory"


@pytest.mark.parametrize(
    ("free", "held", "total", "said"),
    [
        (90, 47, 139.7, "more than 47.5 GiB"), (1, 30, 139.7, "card is full, of which 108.7 GiB are others'"),
        (0.1, 47, 47.6, "more than the card has"),
    ],
)  # fmt: skip
def test_memory_that_is_full_below_the_cap_is_told_from_the_cap(free, held, total, said, monkeypatch):
    with_ours()
    from paperlm.bench.ops.descent import updates

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * 2**30), int(total * 2**30)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held * 2**30)
    assert said in updates._why_full(torch.device("cuda"))


def test_a_turn_is_an_update_that_is_not_timed_and_three_that_are(monkeypatch):
    operation = with_ours().operation("descent")
    from paperlm_kernels.bench.operation import Task

    from paperlm.bench.ops.descent import updates

    made, real = [], updates.updates

    def counted(*given):
        update = real(*given)
        return lambda ids: made.append(1) or update(ids)

    monkeypatch.setattr(updates, "updates", counted)
    task = Task(
        "descent", "gpt_neo_2_7b", "lomo", ("update",), warmup=2, small=True, device="cpu", options={"updates": 1}
    )
    steps = updates.rows_of(operation, task)
    seen = [steps.send(None), len(made), steps.send(True), len(made), steps.send(True), len(made)]
    assert operation.in_turns and seen == [None, 3, None, 7, None, 11]
    assert steps.send(False)["n"] == 6, "of two turns"
    steps.close()


def test_kernels_of_an_update_are_of_one_phase_each_by_their_whole_names():
    with_ours()
    from paperlm_kernels.neuzip import kernel_codebook, kernel_decode, kernel_encode, kernel_pairs

    from paperlm.bench.ops.descent.updates import phase_of

    ours = {
        name
        for module in (kernel_codebook, kernel_decode, kernel_encode, kernel_pairs)
        for name in vars(module)
        if name.endswith("_kernel")
    }
    assert {"decode_kernel", "decode_fix4_kernel", "write_kernel", "pairs_kernel"} <= ours
    for name in ours:
        assert phase_of(name) == ("decoding" if name.startswith("decode_") else "encoding")
    for name in (
        "nvjet_sm90_tst_256x8", "sm80_xmma_gemm_bf16", "void gemv2T_kernel_val<int, int, __nv_bfloat16>(x)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(T1::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<x>>(y)",
    ):  # fmt: skip
        assert phase_of(name) == "products"
    for name in (
        "void at::native::vectorized_elementwise_kernel<4, x>(int)", "Memcpy DtoH (Device -> Pinned)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(x)", "void pytorch_flash::flash_fwd_kernel<x>(y)",
        "void at::native::reduce_kernel<512, 1, x>(y)",
    ):  # fmt: skip
        assert phase_of(name) == "others"


def test_kernels_are_told_by_what_is_made_of_their_whole_names_and_none_is_left_out():
    from paperlm_kernels.bench import clocks

    step = clocks.Step(lambda: torch.ones(64, 64), lambda x: (x @ x).relu_().sum())
    found = clocks.kernel_times(step, torch.device("cpu"), warmup=1, runs=2, name_of=lambda name: name[:5])
    assert set(found) == {"aten:"} and found["aten:"][1] >= 4, "all operators, short ones too"


def test_cases_have_the_published_numbers_of_parameters():
    """GPT-Neo 2.7B 2,651,307,520 (EleutherAI's card: 2.7B), Llama-3 8B 8,030,261,248, Llama-2 13B 13,015,864,320."""
    import transformers

    with_ours()
    from paperlm_kernels.bench.ops.descent import CASES

    sizes = {}
    for name, case in CASES.items():
        with torch.device("meta"):
            config = getattr(transformers, f"{case.model}Config")(**case.config)
            model = transformers.AutoModelForCausalLM.from_config(config)
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert sizes == {
        "gpt_neo_2_7b": 2_651_307_520, "llama3_8b": 8_030_261_248, "llama2_13b": 13_015_864_320,
        "llama3_8b_one": 8_030_261_248,
    }  # fmt: skip
