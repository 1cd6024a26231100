"""The benchmark of linear cross-entropy: its data, methods and what it measures."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from paperlm_kernels.bench import clocks, ops
from paperlm_kernels.bench.operation import Task
from paperlm_kernels.bench.ops.cross_entropy import accuracy, measure, task
from paperlm_kernels.bench.ops.cross_entropy.data import IGNORED, Inputs, describe, make_inputs
from paperlm_kernels.bench.ops.cross_entropy.declared import CASES, GROUPS, Case
from paperlm_kernels.bench.ops.cross_entropy.methods import METHODS

CPU = torch.device("cpu")
SMALL = Case("small", "", vocab=640, width=24, softcap=20.0, tokens=256, counting=0.5, dtype="float32")


# -- cases and data ----


@pytest.mark.parametrize(
    ("case", "mib"),
    [
        ("gemma2_2b", 1161), ("gemma2_9b", 1806), ("gemma2_27b", 2322), ("llama3_8b", 1066), ("mistral_nemo", 1360),
        ("phi35_mini", 236), ("qwen25_7b", 1095),
    ],
)  # fmt: skip
def test_the_lower_bound_of_memory_is_the_published_one(case, mib):
    assert abs(CASES[case].lower_bound - mib) <= 0.5


def test_one_product_at_the_shape_of_table_1_takes_12_23_ms_at_790_teraflops():
    assert CASES["gemma2_2b"].floor(790e12) == pytest.approx(12.23, abs=0.005)


def test_every_case_of_a_table_exists():
    assert {name for names in GROUPS.values() for name in names} <= set(CASES)


def test_synthetic_data_meet_the_three_facts_known_of_trained_models():
    case = dataclasses.replace(CASES["gemma2_2b_uncapped"], tokens=512, width=1024)
    facts = describe(make_inputs(case), None, chunk=128, tiles=((128, 128),))
    assert facts.eps == 2**-12
    assert facts.above == pytest.approx(1.9e-4, rel=0.1)
    assert 50 <= facts.rank <= 65
    assert 0.22 <= facts.alive["128x128"] <= 0.30


def test_targets_follow_the_zipf_law_that_the_first_column_holds():
    case = Case("zipf", "", vocab=1000, width=8, tokens=40_000)
    data = make_inputs(case)
    probability = (-1.125 * torch.arange(1, 1001, dtype=torch.float64).log()).softmax(0)
    found = torch.bincount(data.target, minlength=1000) / 40_000
    for identity in (0, 1, 10, 100):
        p = probability[identity]
        assert abs(found[identity] - p) < 4 * math.sqrt(p * (1 - p) / 40_000)
    assert (data.hidden[:, 0] == 32).all()
    assert data.weight[999, 0].item() == pytest.approx(-1.125 * math.log(1000) / 32, rel=2**-8)
    assert data.weight[:, 1:].float().var().item() == pytest.approx(1 / 8, rel=0.1)


def test_one_seed_gives_one_set_of_inputs_and_another_seed_another():
    first, again, other = (make_inputs(SMALL, seed=seed) for seed in (3, 3, 4))
    for field in ("hidden", "weight", "target"):
        assert torch.equal(getattr(first, field), getattr(again, field))
        assert not torch.equal(getattr(first, field), getattr(other, field))


def test_relabelling_ids_keeps_the_softmax_and_spreads_it_over_more_tiles():
    case = Case("zipf", "", vocab=64_000, width=768, tokens=128)
    natural, permuted = (describe(make_inputs(case, permute=p), None, tiles=((128, 32),)) for p in (False, True))
    assert permuted.above == pytest.approx(natural.above, rel=1e-3)
    assert permuted.rank == natural.rank
    assert permuted.alive["128x32"] > 1.5 * natural.alive["128x32"]
    assert permuted.alive["128x32 sorted"] == pytest.approx(natural.alive["128x32 sorted"], abs=0.005)


def test_ignored_tokens_come_in_runs_and_leave_the_share_that_was_asked_for():
    case = dataclasses.replace(CASES["gemma2_2b_invalids"], vocab=500, width=8)
    target = make_inputs(case).target
    counts = target != IGNORED
    assert counts.sum() == round(0.36 * 8192)
    runs = 1 + (counts[1:] != counts[:-1]).sum().item()
    assert runs == 2 * (8192 // 180)
    complete = make_inputs(dataclasses.replace(case, counting=1.0)).target
    assert torch.equal(target[counts], complete[counts])


@pytest.mark.parametrize("permute", [False, True])
def test_describe_equals_the_definition_on_the_whole_softmax(permute):
    data = make_inputs(dataclasses.replace(SMALL, vocab=700, tokens=300, dtype="bfloat16"), permute=permute)
    found = describe(data, 20.0, chunk=128, tiles=((128, 128), (64, 32)))
    kept = data.target != IGNORED
    logits = 20 * torch.tanh(data.hidden[kept].double() @ data.weight.double().T / 20)
    softmax = logits.softmax(1)
    assert found.above == (softmax >= 2**-12).double().mean().item()
    assert found.rank == (softmax.sort(1, descending=True).values.mean(0)[:512] >= 2**-12).sum().item()
    entries = (softmax - F.one_hot(data.target[kept], 700)).abs()
    for name, matrix in (("", entries), (" sorted", entries[:, logits.mean(0).argsort()])):
        for rows_, columns in ((128, 128), (64, 32)):
            tiles = [tile for block in matrix.split(rows_) for tile in block.split(columns, dim=1)]
            alive = sum((tile >= 2**-12).any().item() for tile in tiles) / len(tiles)
            assert found.alive[f"{rows_}x{columns}{name}"] == alive


# -- methods ----


@pytest.mark.parametrize("name", ["ours", "ours_exact", "ours_full_c", "eager", "torch.compile", "chunked"])
@pytest.mark.parametrize("counting", [1.0, 0.5])
def test_every_method_computes_the_mean_loss_of_the_counting_tokens(name, counting, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = dataclasses.replace(SMALL, counting=counting)
    data = make_inputs(case)
    contender = METHODS[name](case, CPU)
    exact = F.cross_entropy(20 * torch.tanh(data.hidden.double() @ data.weight.double().T / 20), data.target)
    torch.testing.assert_close(contender.loss(data.hidden, data.weight, data.target).double(), exact, rtol=1e-5, atol=0)
    found = accuracy.errors(contender, Inputs(*map(_leaf, _tensors(data))), accuracy.truth(data, 20.0, chunk=200))
    assert found["dE"] < 1e-5
    assert found["dC"] < 1e-5
    assert found.get("nll", 0) < 1e-4
    assert ("lse" in found) == (name.startswith("ours") or name == "eager")


def test_the_truth_is_autograd_in_float64():
    data = make_inputs(SMALL)
    exact = accuracy.truth(data, 20.0, chunk=100)
    hidden, weight = _leaf(data.hidden.double()), _leaf(data.weight.double())
    logits = 20 * torch.tanh(hidden @ weight.T / 20)
    nll = F.cross_entropy(logits, data.target, reduction="none")
    nll.sum().div((data.target != IGNORED).sum()).backward()
    torch.testing.assert_close(exact.nll, nll.detach(), rtol=1e-12, atol=1e-12)
    lse = torch.where(data.target != IGNORED, logits.logsumexp(1), 0.0)
    torch.testing.assert_close(exact.lse, lse.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(exact.d_hidden, hidden.grad, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(exact.d_weight, weight.grad, rtol=1e-10, atol=1e-15)


def test_an_error_in_a_gradient_is_seen_with_its_size():
    class Doubled(METHODS["eager"].func):
        def loss(self, hidden, weight, target):
            return super().loss(2 * hidden - hidden.detach(), weight, target)

    data = make_inputs(SMALL)
    found = accuracy.errors(Doubled(SMALL, CPU), data, accuracy.truth(data, 20.0))
    assert found["dE"] == pytest.approx(1, abs=1e-4)
    assert found["dC"] < 1e-5
    assert (found["dE norm"], found["dC norm"]) == pytest.approx((2, 1), abs=1e-4)


def test_the_time_of_a_step_is_divided_among_its_kernels():
    contender = METHODS["eager"](SMALL, CPU)
    step = measure.step(contender, Inputs(*map(_leaf, _tensors(make_inputs(SMALL)))), "both")
    found = clocks.kernel_times(step, CPU, warmup=1, runs=3)
    assert found["mm"][1] == 3, "products a step: logits and two gradients"
    assert "add_" not in found, "no gradient is added to that of the run before"
    assert list(found)[-1] == "others" and all(ms >= 0 for ms, _ in found.values())
    longest = [ms for ms, _ in list(found.values())[:-1]]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::f<float>>(int, float)",
            "vectorized_elementwise_kernel",
        ),
        ("forward_kernel", "forward_kernel"),
        ("Memset (Device)", "Memset"),
        ("(anonymous)", "(anonymous)"),
    ],
)
def test_kernels_are_named_without_their_template(kernel, short):
    assert clocks._short(kernel) == short


def test_results_that_change_from_run_to_run_are_called_so():
    class Noisy(METHODS["eager"].func):
        def loss(self, hidden, weight, target):
            return super().loss(hidden, weight * (1 + 1e-3 * torch.rand(())), target)

    data = make_inputs(SMALL)
    assert accuracy.reproducible(METHODS["eager"](SMALL, CPU), data) == {"loss": True, "dE": True, "dC": True}
    assert accuracy.reproducible(Noisy(SMALL, CPU), data) == {"loss": False, "dE": False, "dC": False}


def _tensors(data: Inputs) -> tuple[torch.Tensor, ...]:
    return data.hidden, data.weight, data.target


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


# -- time and memory ----


def test_peak_memory_on_a_cpu_is_what_was_allocated_at_once():
    def two_after_another(_):
        for _ in range(2):
            torch.empty(2**20)
        together = torch.empty(2**19), torch.empty(2**19)
        return len(together)

    assert clocks.peak_memory(clocks.Step(lambda: None, two_after_another), CPU) == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize(("part", "matrices"), [("loss", 3), ("gradient", 2), ("both", 4)])
def test_the_baseline_holds_as_many_logit_matrices_as_its_arithmetic_needs(part, matrices):
    """Float32, capped: forward logits, tanh and log-softmax; backward two gradients beside the two that are kept."""
    case = dataclasses.replace(CASES["tiny_cpu"], tokens=128, vocab=4096, width=16)
    step = measure.step(METHODS["eager"](case, CPU), make_inputs(case), part)
    assert clocks.peak_memory(step, CPU) == pytest.approx(matrices * 128 * 4096 * 4 / 2**20, rel=0.01)


@pytest.mark.parametrize(("repeats", "seconds", "number"), [(3, 100, 3), (50, 0, 10), (50, 100, 50), (5, 0, 5)])
def test_repetitions_are_as_many_as_asked_for_or_ten_when_time_is_short(repeats, seconds, number):
    calls = []
    step = clocks.Step(lambda: calls.append("prepare"), lambda _: calls.append("run"))
    assert len(clocks.times(step, CPU, repeats=repeats, warmup=2, seconds=seconds)) == number
    assert calls == ["prepare", "run"] * (number + 2)


def test_the_gradient_is_measured_without_its_forward_pass():
    data = make_inputs(SMALL)
    step = measure.step(METHODS["eager"](SMALL, CPU), data, "gradient")
    loss = step.prepare()
    assert data.hidden.grad is None
    step.run(loss)
    assert data.hidden.grad is not None
    step.prepare()
    assert data.hidden.grad is None


def test_the_products_alone_are_timed_over_the_counting_tokens():
    asked = Task("cross_entropy", "tiny_cpu", "lower_bound", (), small=True, device="cpu", repeats=2, warmup=1)
    data = make_inputs(dataclasses.replace(asked.sized(CASES), counting=0.5))
    write = lambda *columns, **extra: ops.operation("cross_entropy").row(asked, "cpu", *columns, **extra)  # noqa: E731
    found = list(task._products(asked, data, CPU, write))
    assert [(row["metric"], row["measure"], row["n"]) for row in found] == [
        ("product", "logits", 2), ("product", "dE", 2), ("product", "dC", 2)
    ]  # fmt: skip
    assert all(row["value"] > 0 for row in found)


def test_on_a_cpu_one_repetition_of_both_gives_all_three_times():
    calls = []

    class Counted(METHODS["eager"].func):
        def loss(self, *inputs):
            calls.append(1)
            return super().loss(*inputs)

    data = Inputs(*map(_leaf, _tensors(make_inputs(SMALL))))
    found = measure.cpu_times(Counted(SMALL, CPU), data, repeats=3, warmup=2, seconds=100)
    assert len(calls) == 5 and {name: len(taken) for name, taken in found.items()} == dict.fromkeys(measure.PARTS, 3)
    for loss, gradient, both in zip(*found.values(), strict=True):
        assert min(loss, gradient) > 0 and loss + gradient == pytest.approx(both)


def test_the_memory_of_a_compiled_function_is_counted_too():
    """What its C++ code allocates passes through PyTorch's allocator as well: three matrices, where eager has five."""
    compiled = pytest.importorskip("torch._inductor.cpp_builder").get_cpp_compiler
    try:
        compiled()
    except Exception as error:
        pytest.skip(f"torch.compile needs a C++ compiler: {error}")
    function = torch.compile(lambda x: (x.exp() @ x.sin()).cos().sum())
    matrix = torch.randn(512, 512)
    function(matrix)
    step = clocks.Step(lambda: None, lambda _: function(matrix))
    assert clocks.peak_memory(step, CPU) == pytest.approx(3, abs=0.05)
