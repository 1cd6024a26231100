"""What the Triton kernels promise beyond the right result: the same bits, no uninitialised memory, bounded memory,
capture.

They run under the interpreter (TRITON_INTERPRET=1) and on a GPU; without either there is nothing here to run.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from paperlm_kernels.bench.ops.cross_entropy import accuracy
from paperlm_kernels.bench.ops.cross_entropy.data import make_inputs
from paperlm_kernels.bench.ops.cross_entropy.declared import CASES
from paperlm_kernels.bench.ops.cross_entropy.methods import METHODS
from support_cross_entropy import (
    KERNELS,
    check_values,
    gpu,
    gradients,
    kernels,
    poisoned,
    problem,
    relative,
    run,
    tighten,
    truth,
)

if KERNELS:
    from paperlm_kernels.cross_entropy import launch

MEMORY = ("fast", "balanced", "lean")


@pytest.fixture
def tight(monkeypatch):
    tighten(monkeypatch)


@kernels
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_byte_maxima_start_from_the_log_sum_exp_over_the_target_and_the_first_ids(place, softcap):
    p = problem(place, (1, 300), 40 if place.device == "cpu" else 2304, 500, spread=2.0)
    hidden, weight, bias = (t.detach().double().cpu() for t in p[:3])
    logits = hidden[0] @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    counted = torch.arange(500) < 128
    counted = counted | (p.target[0].cpu()[:, None] == torch.arange(500))
    right = logits.masked_fill(~counted, -math.inf).logsumexp(1)
    for _ in range(1 if place.device == "cpu" else 5):
        saved = launch.run_forward(
            p.hidden[0], p.weight, p.bias, p.target[0], softcap, 1.0, math.log(2.0**-7), False, 0
        )  # fmt: skip
        base = saved.base.logsumexp(0)[:300].cpu()
        torch.testing.assert_close(base.double(), right, rtol=1e-4, atol=1e-4)
        assert (saved.lse.cpu() >= base - 1e-4).all()


@kernels
@pytest.mark.parametrize("softcap,ahead", [(None, 0), (3.0, 0), (None, 14), (None, 40)])
def test_no_tile_with_a_probability_above_the_threshold_is_dropped_and_few_below_it_stay(place, softcap, ahead):
    from paperlm_kernels.cross_entropy import liveness

    if place.dtype != torch.float32:
        pytest.skip("one dtype is enough")
    p = problem(place, (1, 128), 16, 1280, spread=2.0)
    with torch.no_grad():
        p.target.fill_(5)
        p.bias[:128] -= ahead  # nats by which the other ids are ahead of those that the bytes start from
    hidden, weight, bias = (t.detach().double().cpu() for t in p[:3])
    logits = hidden[0] @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    top = logits.softmax(1).amax(0).view(-1, 128).amax(1)
    # a step is a 68th of the power of two that is in 1 + x, at x nats above the base; there are 253
    base = logits[:, :128].logsumexp(1)
    above = (logits.logsumexp(1) - base + base.abs() / 2048).max().item()
    step = 2 ** math.floor(math.log2(1 + above)) / 68
    for eps in (top[1::3] * (1 - 2e-5)).tolist():
        saved = launch.run_forward(
            p.hidden[0], p.weight, p.bias, p.target[0], softcap, 1.0, math.log(eps), False, 0
        )  # fmt: skip
        alive = torch.zeros(1, 10, dtype=torch.int8, device=place.device)
        liveness.alive_kernel[(1, 1)](
            saved.maxima, saved.base, saved.lse, saved.rows, saved.targets, saved.control, alive, 128, 10, GROUPS=32
        )  # fmt: skip
        kept = alive[0].bool().cpu()
        assert kept[0] and kept[top >= eps * (1 + 1e-5)].all()
        assert above > 12 or not kept[1:][top[1:] < eps * math.exp(-1.05 * step - 0.001)].any()


@kernels
def test_a_target_alone_in_its_tile_is_found_at_either_end_of_it(place):
    for target in (0, 127, 128, 255, 256, 299):
        p = problem(place, (1, 1), 16, 300)
        p.target.fill_(target)
        check_values(place, run(place, p, filter_eps=None, reduction="sum"), truth(p, reduction="sum")[0])


@kernels
@pytest.mark.parametrize("filter_eps", [None, 2.0**-5])
def test_three_runs_and_three_grids_give_the_same_bits(place, filter_eps, tight, monkeypatch):
    p = problem(place, (1, 150), 16, 400, ignore="some", spread=4.0)
    first = gradients(place, p, filter_eps=filter_eps)
    monkeypatch.setattr(launch, "MAX_SPLITS", 1)  # strips are summed in their order, and their number follows the grid
    one_strip = gradients(place, p, filter_eps=filter_eps)
    assert all(relative(a, b) <= 1e-2 for a, b in zip(one_strip, first, strict=True))
    for programs in (3,) if place.device == "cpu" else (1, 3, 7, 7):
        monkeypatch.setattr(launch, "programs_of", lambda device, programs=programs: programs)
        monkeypatch.setattr(launch, "L2_BYTES", 0 if programs == 3 else 20 * 2**20)
        again = gradients(place, p, filter_eps=filter_eps)
        assert all(torch.equal(a, b) for a, b in zip(again, one_strip, strict=True))


@kernels
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("filter_eps,order", [(None, None), (2.0**-5, None), (2.0**-5, "mean_logit")])
def test_uninitialised_memory_is_never_used(place, memory, filter_eps, order, tight):
    if place.device == "cpu" and memory == "fast":
        pytest.skip("the interpreter is slow, and in float32 the balanced preset does the same here")
    p = problem(place, (1, 150), 40, 333, ignore="some", spread=4.0)
    right = gradients(place, p, memory=memory, filter_eps=filter_eps, vocab_order=order)
    with poisoned():
        mine = gradients(place, p, memory=memory, filter_eps=filter_eps, vocab_order=order)
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


@kernels
def test_nothing_of_size_tokens_by_vocabulary_or_width_is_saved(place):
    p = problem(place, (1, 256), 64, 1024, bias=False)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t) or t, lambda t: t):
        run(place, p, reduction="sum")
    inputs = {t.data_ptr() for t in (p.hidden, p.weight)}
    extra = [t for t in sizes if t.data_ptr() not in inputs]
    # the byte maxima are the largest: one for every row and group of 128 ids
    assert max(t.numel() * t.element_size() for t in extra) <= 256 * 1024 // 128 + 4 * 256
    assert extra


@gpu
@kernels
def test_a_cuda_graph_replays_on_new_values(place):
    p = problem(place, (1, 300), 64, 900, spread=3.0)
    other = problem(place, (1, 300), 64, 900, spread=3.0, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(place, p, filter_eps=2.0**-6)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(place, p, filter_eps=2.0**-6)
    right = gradients(place, other, filter_eps=2.0**-6)
    with torch.no_grad():
        for mine, new in zip((*p.leaves, p.target), (*other.leaves, other.target), strict=True):
            mine.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, right, strict=True))


@gpu
@kernels
def test_offsets_beyond_two_to_the_31_are_right(place):
    if place.dtype != torch.bfloat16:
        pytest.skip("one dtype is enough")
    p = problem(place, (1, 300), 16, 300, bias=False)
    weight = torch.randn(262144 * 40, 16, device="cuda", dtype=place.dtype).requires_grad_()
    target = torch.randint(0, len(weight), (1, 300), device="cuda")
    big = p._replace(weight=weight, target=target)
    assert 300 * len(weight) > 2**31
    loss = run(place, big, reduction="sum", filter_eps=None)
    mine = torch.autograd.grad(loss, big.leaves)
    logits = (big.hidden.detach().float()[0] @ weight.detach().float().T).requires_grad_()
    right = torch.nn.functional.cross_entropy(logits, target[0], reduction="sum")
    (q,) = torch.autograd.grad(right, logits)
    torch.testing.assert_close(loss, right, rtol=1e-4, atol=0)
    assert relative(mine[0][0], q @ weight.detach().float()) < 5e-3
    assert relative(mine[1], q.T @ big.hidden.detach().float()[0]) < 5e-3


@gpu
@kernels
@pytest.mark.parametrize("memory,filter_eps,share,floor", [
    ("fast", "auto", 0.20, 128), ("balanced", "auto", 0.05, 48), ("balanced", None, 0.25, 48), ("lean", "auto", 0.004,
    4),
])  # fmt: skip
@pytest.mark.parametrize(
    "tokens,order,frozen",
    [(4096, None, False), (4096, "mean_logit", False), (4096, "mean_logit", True), (12288, "mean_logit", False)],
)
def test_the_peak_stays_within_the_preset(place, memory, filter_eps, share, floor, tokens, order, frozen):
    if place.dtype != torch.bfloat16:
        pytest.skip("one dtype is enough")
    vocab, width = 131072, 2048
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=place.dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, device="cuda", dtype=place.dtype, generator=generator) / 16
    weight.requires_grad_(not frozen)
    target = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    p = problem(place)._replace(hidden=hidden, weight=weight, bias=None, target=target)
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(place, p, memory=memory, filter_eps=filter_eps, keep_logits=False, vocab_order=order).backward()
        peak = torch.cuda.max_memory_allocated() - before
    bound = (tokens + vocab) * width * 2
    assert peak <= bound + max(share * bound, floor * 2**20) + (2 * 2**20 if order else 0)


@kernels
@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_recomputed_gradients_are_as_close_to_float64_as_pytorchs_in_the_same_dtype(place, memory, tight):
    p = problem(place, (1, 150), 32, 400, ignore="some", spread=2.0)
    mine = gradients(place, p, reduction="sum", softcap=30.0, filter_eps=None, memory=memory)
    right, _, leaves = truth(p, reduction="sum", softcap=30.0)
    truths = torch.autograd.grad(right, leaves)
    pytorch = gradients(place._replace(backend="eager"), p, reduction="sum", softcap=30.0)
    for a, b, exact in zip(mine[1:], pytorch[1:], truths, strict=True):
        assert relative(a, exact) <= max(1e-5, 1.5 * relative(b, exact))


@kernels
def test_kept_logits_give_the_gradient_that_pytorch_gives_and_survive_a_second_pass(place):
    p = problem(place, (1, 150), 32, 400, ignore="some", spread=2.0)
    # tokens of which the model is certain: their small gradient must come from the logits that the log-sum-exp saw
    with torch.no_grad():
        p.hidden[0, :40] = 60 * p.weight[p.target[0, :40].clamp(min=0)]
    loss = run(place, p, reduction="sum", softcap=30.0, filter_eps=None, keep_logits=True)
    first = torch.autograd.grad(loss, p.leaves, retain_graph=True)
    second = torch.autograd.grad(loss, p.leaves)
    right, _, leaves = truth(p, reduction="sum", softcap=30.0)
    truths = torch.autograd.grad(right, leaves)
    pytorch = torch.autograd.grad(run(place._replace(backend="eager"), p, reduction="sum", softcap=30.0), p.leaves)
    for mine, theirs, exact in zip(first, pytorch, truths, strict=True):
        assert relative(mine, exact) <= max(1e-5, 1.5 * relative(theirs, exact))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@kernels
def test_with_kept_logits_ignored_tokens_count_nothing_and_a_wrong_id_stays_in_the_loss(place, monkeypatch):
    # a GPU does not look at the ids: a wrong one has log-sum-exp as its loss and the gradient of that
    monkeypatch.setattr("paperlm_kernels.cross_entropy.function._check_ids", lambda *_: None)
    p = problem(place, (1, 130), 32, 400, bias=False, ignore="some")
    p.target[0, 3] = 400
    loss, lse = run(place, p, reduction="none", filter_eps=None, keep_logits=True, return_lse=True)
    right = (p.hidden.detach().double() @ p.weight.detach().double().T).logsumexp(-1)
    right = torch.where(p.target == -100, 0.0, right)
    bound = 1e-5 if place.dtype == torch.float32 else 2e-2  # kept logits are rounded to the inputs' dtype
    torch.testing.assert_close(lse.double(), right, atol=bound, rtol=0)
    assert loss[0, 3] == lse[0, 3] and (loss[p.target == -100] == 0).all()
    (gradient,) = torch.autograd.grad(loss[0, 3], p.hidden)
    exact = (
        torch.softmax(p.hidden[0, 3].detach().double() @ p.weight.detach().double().T, 0) @ p.weight.detach().double()
    )
    assert relative(gradient[0, 3], exact) <= (1e-5 if place.dtype == torch.float32 else 2e-2)


@kernels
@pytest.mark.parametrize("preset", ["cce", "cce_kahan_full_c", "cce_kahan_full_e"])
def test_presets_mean_what_the_reference_says(place, preset):
    p = problem(place, (1, 140), 16, 300, ignore="some", spread=4.0)
    mine = torch.autograd.grad(run(place, p, preset=preset), p.leaves)
    right = torch.autograd.grad(run(place._replace(backend="reference"), p, preset=preset), p.leaves)
    bound = 1e-2 if place.dtype.itemsize == 2 else 1e-5
    assert all(relative(a, b) <= bound for a, b in zip(mine, right, strict=True))


@kernels
def test_ids_that_a_bias_rules_out_do_not_spoil_the_sum(place):
    p = problem(place, (1, 40), 16, 700)
    with torch.no_grad():
        p.bias[:300] = -torch.inf
        p.target.clamp_(min=300)
    loss = run(place, p, reduction="sum", filter_eps=None)
    torch.testing.assert_close(loss.double().cpu(), truth(p, reduction="sum")[0], rtol=1e-4, atol=0)


@kernels
@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_frozen_head_compiles_and_gives_the_other_gradient(place, keep_logits):
    p = problem(place, (1, 64), 16, 320, bias=False)
    frozen = p._replace(weight=p.weight.detach())

    def step(hidden):
        return run(place, frozen._replace(hidden=hidden), reduction="sum", filter_eps=None, keep_logits=keep_logits)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    (mine,) = torch.autograd.grad(compiled(p.hidden), [p.hidden])
    (right,) = torch.autograd.grad(step(p.hidden), [p.hidden])
    assert torch.equal(mine, right)


@kernels
def test_a_token_whose_target_is_not_among_the_first_ids_keeps_few_tiles(place):
    """The base of the byte maxima follows the target, so that unused ids in front do not make every tile alive."""
    p = problem(place, (1, 128), 16, 1280, bias=True)
    with torch.no_grad():
        p.hidden.zero_()
        p.bias.fill_(-12.0)
        p.bias[:128] = -40.0
        p.bias[640:768] = 0.0
        p.target.fill_(700)
    from paperlm_kernels.cross_entropy import liveness

    saved = launch.run_forward(p.hidden[0], p.weight, p.bias, p.target[0], None, 1.0, -8.3, False, 0)
    alive = torch.zeros(1, 10, dtype=torch.int8, device=place.device)
    liveness.alive_kernel[(1, 1)](
        saved.maxima,
        saved.base,
        saved.lse,
        saved.rows,
        saved.targets,
        saved.control,
        alive,
        128,
        10,
        GROUPS=32,
    )
    assert alive.sum().item() == 1 and alive[0, 5] == 1


@kernels
@pytest.mark.parametrize("need", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("maxima,keep,memory", [
    (-3.5, False, "balanced"), (-3.5, False, "fast"), (0.0, False, "balanced"), (0.0, True, "balanced"),
])  # fmt: skip
def test_the_operators_are_what_their_fake_kernels_say(place, need, maxima, keep, memory):
    from paperlm_kernels.cross_entropy.ops import backward_op, forward_op

    p = problem(place, (1, 40), 16, 264)
    hidden, weight, bias, target = p.hidden.detach()[0], p.weight.detach(), p.bias.detach(), p.target[0]
    arguments = (hidden, weight, bias, target, 5.0, 1.0, maxima, keep, 0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward_op, arguments, test_utils=checks)
    lse, _, *saved = forward_op(*arguments)
    eps = 2.0**-5 if maxima else None
    gradient = torch.ones_like(lse)
    settings = (5.0, 1.0, eps, "both" if maxima else "none", "fp32", memory, 0, list(need), False)
    arguments = (hidden, weight, bias, target, lse, *saved, None, gradient, -gradient, *settings)
    torch.library.opcheck(backward_op, arguments, test_utils=checks)


@gpu
@kernels
def test_on_calibrated_data_the_filter_costs_little_accuracy_and_full_sums_cost_none(place):
    if place.dtype != torch.bfloat16:
        pytest.skip("the data are those of models in bfloat16")
    case = dataclasses.replace(CASES["gemma2_2b"], tokens=2048)
    inputs = make_inputs(case, device=place.device)
    inputs.hidden.requires_grad_()
    inputs.weight.requires_grad_()
    exact = accuracy.truth(inputs, case.softcap)
    for method, bounds in {"ours": (5e-2, 5e-3), "ours_exact": (5e-3, 5e-3)}.items():
        contender = METHODS[method](case, torch.device(place.device))
        found = accuracy.errors(contender, inputs, exact)
        assert found["dE"] <= bounds[0] and found["dC"] <= bounds[1], (method, found)
        assert found["lse"] <= 2e-5 * 30 and found["nll"] <= 2e-5 * 30
