"""What the Triton kernels promise beyond the right result: the same bits, no uninitialised memory, bounded memory,
capture.

They run under the interpreter (TRITON_INTERPRET=1) and on a GPU; without either there is nothing here to run.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from paperlm_kernels.bench import accuracy
from paperlm_kernels.bench.methods import METHODS
from paperlm_kernels.cross_entropy.data import CASES, make_inputs
from support_cross_entropy import PLACES, Place, check_gradients, problem, relative, run, truth

KERNELS = [p for p in PLACES if p.backend == "triton"]
kernels = pytest.mark.parametrize("place", KERNELS, ids=str)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if KERNELS:
    import triton
    import triton.language as tl
    from paperlm_kernels.cross_entropy import launch
    from paperlm_kernels.cross_entropy.products import _lead, _remainder, _turns, _unit_of, _unsplit

    @triton.jit
    def there_and_back(x, value, y, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        short = tl.load(value + at)  # the interpreter's own conversion to bfloat16 cuts off instead of rounding
        tl.store(y + at, _unsplit(short, _remainder(tl.load(x + at), short)))

    @triton.jit
    def share_out(done, long_units, long_length, short_units, short_length):
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        heavy, lead = _lead(long_units, long_length, short_units, short_length, programs)
        for turn in range(_turns(long_units, programs, 0, 0)):
            unit = _unit_of(turn, program, programs, 0, 0)
            if unit < long_units:
                tl.store(done + unit * programs + program, tl.load(done + unit * programs + program) + 1)
        for turn in range(_turns(short_units, programs, heavy, lead)):
            unit = _unit_of(turn, program, programs, heavy, lead)
            if unit < short_units:
                at = done + (long_units + unit) * programs + program
                tl.store(at, tl.load(at) + 1)


MEMORY = ("fast", "balanced", "lean")
FILTERS = ("both", "hidden", "weight")


def gradients(place, p, **keywords):
    loss = run(place, p, **keywords)
    return [loss.detach(), *torch.autograd.grad(loss, p.leaves)]


def tighten(monkeypatch):
    """No scratch beyond one group of tiles, so that there are as many waves as can be."""
    monkeypatch.setattr(launch, "BUDGETS", {k: (0.0, 0) for k in launch.BUDGETS})
    monkeypatch.setattr(launch, "UNFILTERED_BALANCED", 0.0)
    monkeypatch.setattr(launch, "MOST_WAVES", {})


@pytest.fixture
def tight(monkeypatch):
    tighten(monkeypatch)


@kernels
@pytest.mark.parametrize("memory", MEMORY)
def test_many_waves_give_what_one_gives(place, memory, monkeypatch):
    p = problem(place, (1, 140), 16, 500, ignore="some", spread=4.0)
    settings = [{"filter_eps": 2.0**-5, "filter_grads": f} for f in FILTERS] + [{"filter_eps": None}]
    if place.device == "cpu":  # the interpreter is slow, and the presets differ in the scratch and in how dE is carried
        settings = settings[1::2] if memory == "balanced" else settings[:1]
    roomy = [gradients(place, p, memory=memory, **s) for s in settings]
    tighten(monkeypatch)
    for setting, right in zip(settings, roomy, strict=True):
        mine = gradients(place, p, memory=memory, **setting)
        check_gradients(place, mine[1:], right[1:], {0: 1e-2 if place.dtype.itemsize == 2 else 1e-5})


@kernels
@pytest.mark.parametrize("dtype,bits", [(torch.bfloat16, 8), (torch.float16, 11)])
def test_a_triton_byte_holds_eight_bits_more_than_a_16_bit_number(place, dtype, bits):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, generator=g) * torch.exp2(torch.randint(-30, 15, (1024,), generator=g))
    x[:8] = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.99999994, 1.0000001, 2.0**-24, -(2.0**-13) * 1.001])
    x = x.to(place.device)
    value, y = x.to(dtype), torch.empty_like(x)
    there_and_back[(4,)](x, value, y, BLOCK=256)
    # half a 254th of the spacing of the 16-bit numbers there, which in float16 is at least 2^-24
    spacing = torch.exp2(torch.frexp(value.float()).exponent.float() - bits)
    spacing = spacing.clamp(min=2.0**-24) if dtype == torch.float16 else spacing
    assert ((y - x).abs() <= spacing * (0.501 / 254) + 1e-7 * x.abs() + 2.0**-130).all()


SIXTEEN_BITS = [Place(p.backend, p.device, torch.float16) for p in KERNELS if p.dtype == torch.float32]
SIXTEEN_BITS += [p for p in KERNELS if p.dtype == torch.bfloat16]


@pytest.mark.parametrize("place", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("filter_eps", [None, 2.0**-7])
def test_sums_carried_in_16_bits_and_a_byte_round_as_those_of_one_wave(place, filter_eps, monkeypatch):
    if place.device == "cpu" and filter_eps is None:
        pytest.skip("the interpreter is slow")
    p = problem(place, (1, 150), 40, 800, bias=False, ignore="some")
    settings = {"filter_eps": filter_eps, "logit_scale": 0.3, "reduction": "sum"}
    whole = gradients(place, p, **settings)[1]
    tighten(monkeypatch)
    carried, rounded = (gradients(place, p, memory=m, **settings)[1] for m in ("balanced", "lean"))
    # seven sums: with a byte beyond its dtype one in a hundred comes out on the other side of a rounding boundary
    assert (carried == whole).float().mean() > 0.97 > (rounded == whole).float().mean()
    assert relative(carried, whole) < 0.1 * relative(rounded, whole) + 2e-5


@pytest.mark.parametrize("place", SIXTEEN_BITS, ids=str)
def test_sums_rounded_to_the_inputs_dtype_are_those_of_the_reference(place, tight):
    p = problem(place, (1, 130), 16, 900, bias=False)
    settings = {"filter_eps": None, "reduction": "sum"}
    mine = gradients(place, p, accumulate="input", **settings)[1]
    same, other = (
        gradients(place._replace(backend="reference"), p, accumulate=how, **settings)[1] for how in ("input", "fp32")
    )
    assert relative(mine, same) < 0.6 * relative(mine, other)


@kernels
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_no_tile_with_a_probability_above_the_threshold_is_dropped_and_few_below_it_stay(place, softcap):
    from paperlm_kernels.cross_entropy import liveness

    if place.dtype != torch.float32:
        pytest.skip("one dtype is enough")
    p = problem(place, (1, 128), 16, 1280, spread=2.0)
    with torch.no_grad():
        p.target.fill_(5)
    hidden, weight, bias = (t.detach().double().cpu() for t in p[:3])
    logits = hidden[0] @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    top = logits.softmax(1).amax(0).view(-1, 128).amax(1)
    for eps in top[1::3].tolist():
        saved = launch.run_forward(
            p.hidden[0], p.weight, p.bias, p.target[0], softcap, 1.0, math.log(eps), False, 0
        )  # fmt: skip
        alive = torch.zeros(1, 10, dtype=torch.int8, device=place.device)
        liveness.alive_kernel[(1, 1)](
            saved.maxima, saved.base, saved.lse, saved.rows, saved.targets, saved.control, alive, 128, 10, GROUPS=32
        )  # fmt: skip
        kept = alive[0].bool().cpu()
        assert kept[0] and kept[top >= eps * (1 + 1e-4)].all()
        assert not kept[1:][top[1:] < eps * math.exp(-0.06)].any()


@pytest.mark.parametrize(
    "groups,row_blocks,slots,row_slots", [(2000, 64, 36128, 18.0), (7, 3, 3, 0.0), (9, 2, 33, 3.2)]
)
def test_the_waves_cover_the_vocabulary_and_each_fits(groups, row_blocks, slots, row_slots):
    pytest.importorskip("triton")
    from paperlm_kernels.cross_entropy.launch import wave_count

    first, waves = 0, 0
    while first < groups:
        end = max(e for e in range(first, groups + 1) if -(-e * row_slots // 1) + (e - first) * row_blocks <= slots)
        assert end > first
        first, waves = end, waves + 1
    assert wave_count(groups, row_blocks, slots, row_slots) == waves


@pytest.mark.parametrize("tokens,vocab,width,waves", [
    (8192, 256000, 2304, 32), (32768, 50257, 768, 17), (65536, 32000, 768, 11), (131072, 128256, 4096, 32),
    (131072, 32000, 256, 4), (100, 300, 16, 4),
])  # fmt: skip
@pytest.mark.parametrize("memory,exact,limit", [("balanced", False, 32), ("balanced", True, 16), ("fast", False, 16)])
def test_long_batches_take_few_waves_or_256_mib(tokens, vocab, width, waves, memory, exact, limit):
    pytest.importorskip("triton")
    from paperlm_kernels.cross_entropy.launch import MIB, SLOT, most_waves, spare_slots, wave_count

    row_blocks, groups, row_slots = -(-tokens // 128), -(-vocab // 128), width / 128
    bound = 2 * (tokens + vocab) * width
    most = most_waves(memory, exact, groups, -(-width // 256), 132)
    assert most == min(waves, limit)
    spare = spare_slots(memory, exact, bound, 0, row_blocks, groups, row_slots, 2, most)
    waves = wave_count(groups, row_blocks, spare + -int(-groups * row_slots // 1), row_slots)
    assert waves <= most or spare >= 256 * MIB // (2 * SLOT)
    assert 2 * SLOT * spare <= max(0.25 * bound, 256 * MIB)


@kernels
@pytest.mark.parametrize("programs,long_units,long_length,short_units,short_length", [
    (12, 6, 32, 96, 2), (12, 52, 31, 270, 6), (12, 3, 24, 70, 1), (4, 3, 10, 40, 2), (4, 8, 10, 5, 2), (7, 0, 5, 3, 1),
    (12, 5, 1, 3, 1),
])  # fmt: skip
def test_programs_do_every_unit_once_and_end_together(
    place, programs, long_units, long_length, short_units, short_length
):
    if place.dtype != torch.float32:
        pytest.skip("one dtype is enough")
    turns = torch.zeros(long_units + short_units, programs, dtype=torch.int32, device=place.device)
    share_out[(programs,)](turns, long_units, long_length, short_units, short_length)
    assert (turns.sum(1) == 1).all()
    load = turns[:long_units].sum(0) * long_length + turns[long_units:].sum(0) * short_length
    fair = max(load.sum().item() / programs, long_length if long_units else 0)
    slack = short_length if short_units * short_length >= programs * long_length else long_length
    assert load.max() <= fair + 2 * slack


@kernels
@pytest.mark.parametrize("filter_eps", [None, 2.0**-5])
def test_three_runs_and_three_grids_give_the_same_bits(place, filter_eps, tight, monkeypatch):
    p = problem(place, (1, 260), 16, 400, ignore="some", spread=4.0)
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
@pytest.mark.parametrize("filter_eps", [None, 2.0**-5])
def test_uninitialised_memory_is_never_read(place, memory, filter_eps, tight):
    p = problem(place, (1, 150), 40, 333, ignore="some", spread=4.0)
    right = gradients(place, p, memory=memory, filter_eps=filter_eps)
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        mine = gradients(place, p, memory=memory, filter_eps=filter_eps)
    finally:
        torch.use_deterministic_algorithms(False)
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
def test_the_peak_stays_within_the_preset(place, memory, filter_eps, share, floor):
    if place.dtype != torch.bfloat16:
        pytest.skip("one dtype is enough")
    tokens, vocab, width = 4096, 131072, 2048
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=place.dtype, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda", dtype=place.dtype, generator=generator) / 16).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    p = problem(place)._replace(hidden=hidden, weight=weight, bias=None, target=target)
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(place, p, memory=memory, filter_eps=filter_eps, keep_logits=False).backward()
        peak = torch.cuda.max_memory_allocated() - before
    bound = (tokens + vocab) * width * 2
    assert peak <= bound + max(share * bound, floor * 2**20)


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
@pytest.mark.parametrize("preset", ["cce", "cce_kahan_full_c", "cce_kahan_full_e"])
def test_presets_mean_what_the_reference_says(place, preset):
    p = problem(place, (1, 140), 16, 300, ignore="some", spread=4.0)
    mine = torch.autograd.grad(run(place, p, preset=preset), p.leaves)
    right = torch.autograd.grad(run(place._replace(backend="reference"), p, preset=preset), p.leaves)
    bound = 1e-2 if place.dtype.itemsize == 2 else 1e-5
    assert all(relative(a, b) <= bound for a, b in zip(mine, right, strict=True))


@kernels
def test_a_strided_order_is_read_right(place):
    p = problem(place, (1, 140), 16, 300, spread=4.0)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).int().to(place.device)
    strided = torch.stack([order, order.flip(0)], 1)[:, 0]
    results = [gradients(place, p, filter_eps=2.0**-5, vocab_order=o) for o in (order, strided)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
        contender = METHODS[method][0](case, torch.device(place.device))
        found = accuracy.errors(contender, inputs, exact)
        assert found["dE"] <= bounds[0] and found["dC"] <= bounds[1], (method, found)
        assert found["lse"] <= 2e-5 * 30 and found["nll"] <= 2e-5 * 30
