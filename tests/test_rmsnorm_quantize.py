"""RMSNorm, TopK and the quantizers of activations in one pass: integers against float64, gradients, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from paperlm_kernels.rmsnorm_quantize import MODES, rmsnorm_fake_quantize, rmsnorm_quantize
from support_ternary import compiled_or_interpreted, everywhere, normal

ALL = [(name, 1) for name in MODES] + [("int4_absmean", 2)]
modes = pytest.mark.parametrize("mode,multiple", ALL)


def oracle(y, mode, multiple=1):
    """Codes before rounding, after it, and the value of a code, in float64 from the paper's formulas."""
    y = y.double()
    top, mean = y.abs().amax(-1, keepdim=True).clamp(min=1e-5), y.abs().mean(-1, keepdim=True)
    if mode == "fp4_e2m1":
        bias = torch.log2((2 - 2**-1) / top) + 2**2 - 1
        exponent = (torch.log2(y.abs()) + bias).floor().clamp(min=1)
        step = 2 ** (exponent - bias - 1)
        unit = top / 12
        return y / step, ((y / step).round() * step / unit).round(), unit
    unit = {
        "int8_absmax": top / 127,
        "int4_absmax": top / 7,
        "fp4_e1m2": top / 7,
        "int4_absmean": (multiple * mean).clamp(min=1e-5) / math.sqrt(7),
    }[mode]
    low, high = {"int8_absmax": (-128, 127)}.get(mode, (-8, 7))
    return y / unit, (y / unit).round().clamp(low, high), unit


def normed(x, gain, eps=1e-5):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()


def check(out, y, mode, multiple=1, most=0.002):
    """Codes equal the oracle's but where it is within float32's rounding of a tie, which is rare."""
    exact, codes, unit = oracle(y, mode, multiple)
    width = y.shape[-1]
    mine = out.codes[..., :width].double().cpu()
    distance = ((exact - exact.floor()) - 0.5).abs()
    tie = distance < 1e-6 * exact.abs().clamp(min=1)
    assert ((mine == codes) | tie).all()
    assert tie.double().mean() <= most
    assert not out.codes[..., width:].any() and out.codes.shape[-1] % 128 == 0
    torch.testing.assert_close(out.scale.double().cpu(), unit[..., 0], rtol=1e-6, atol=0)
    assert torch.equal(out.rowsum.cpu(), out.codes.cpu().sum(-1, dtype=torch.int32))


@everywhere
@modes
@pytest.mark.parametrize("width", [1, 200, 688])
def test_codes_are_those_of_the_papers_formulas_in_float64(spot, mode, multiple, width):
    x, gain = normal(2, 3, width, device=spot.device), normal(width, seed=1, device=spot.device).abs() + 0.5
    check(rmsnorm_quantize(x, None, mode, multiple=multiple, backend=spot.backend), x.cpu(), mode, multiple)
    out = rmsnorm_quantize(x, gain, mode, multiple=multiple, backend=spot.backend)
    assert out.codes.dtype == torch.int8 and out.scale.shape == out.rowsum.shape == (2, 3)
    check(out, normed(x.cpu(), gain.cpu()), mode, multiple)


@modes
def test_codes_equal_the_oracle_on_half_a_million_values_but_at_ties(mode, multiple):
    x = normal(128, 4096, seed=3)
    check(rmsnorm_quantize(x, None, mode, multiple=multiple, backend="reference"), x, mode, multiple, most=1e-3)


def test_rounding_goes_to_the_even_neighbour_and_clipping_is_inclusive():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]])
    assert rmsnorm_quantize(x, None).codes[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -127]
    beta = math.sqrt(7)  # with this mean magnitude a step is one
    rest = 8 * beta - 21
    x = torch.tensor([[9.0, -9.0, 3.0, rest, 0.0, 0.0, 0.0, 0.0]])
    assert x.abs().mean().item() == pytest.approx(beta)
    assert rmsnorm_quantize(x, None, "int4_absmean").codes[0, :4].tolist() == [7, -8, 3, 0]
    half = rmsnorm_quantize(x, None, "int4_absmean", multiple=2).codes[0, :4].tolist()
    assert half == [4, -4, 2, 0]  # 4.5 and 1.5 are ties


@everywhere
def test_fp4_codes_are_twice_the_values_of_e2m1_and_e1m2_is_int4_absmax(spot):
    x = normal(4, 512, device=spot.device)
    codes = rmsnorm_quantize(x, None, "fp4_e2m1", backend=spot.backend).codes
    assert set(codes.abs().unique().tolist()) == {0, 1, 2, 3, 4, 6, 8, 12}
    a, b = (rmsnorm_quantize(x, None, mode, backend=spot.backend) for mode in ("fp4_e1m2", "int4_absmax"))
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize(
    "mode,multiple,gaussian,product",
    [("int4_absmean", 1, 0.0132, 0.60), ("int4_absmean", 2, None, 0.39), ("fp4_e2m1", 1, 0.0142, 0.067),
     ("int4_absmax", 1, 0.0249, None), ("int8_absmax", 1, None, 9.5e-4)],
)  # fmt: skip
def test_relative_errors_are_those_that_the_formulas_have_on_gaussian_rows(mode, multiple, gaussian, product):
    def error(y):
        out = rmsnorm_quantize(y, None, mode, multiple=multiple, backend="reference")
        values = out.codes[..., : y.shape[-1]].double() * out.scale[..., None].double()
        return ((values - y) ** 2).sum().item() / (y.double() ** 2).sum().item()

    if gaussian is not None:
        assert error(normal(256, 4096)) == pytest.approx(gaussian, rel=0.02)
    if product is not None:
        # The largest entry of a row sets the step, so that rows differ by a third: the figures are of a few rows.
        glu = normal(128, 11008, seed=1) * normal(128, 11008, seed=2).relu() ** 2
        assert error(glu) == pytest.approx(product, rel=0.1)


@everywhere
@pytest.mark.parametrize("keep,width", [(0.5, 200), (0.25, 96), (0.5, 2)])
def test_topk_keeps_exactly_so_many_and_of_equals_the_first(spot, keep, width):
    x = normal(5, width, device=spot.device)
    x[1] = 2.0  # all equal
    x[3] = torch.linspace(0.01, 0.06, width, device=spot.device)[torch.randperm(width)]
    x[3, -1] = 1.0  # what the last that is kept is far below a sixteenth of
    x[4] = 0.0
    x[4, 0] = 1.0  # fewer than are kept are not zero
    g = torch.Generator().manual_seed(0)
    many = torch.randint(-20, 21, (48, width), generator=g) * torch.rand(48, 1, generator=g)  # equals everywhere
    x = torch.cat([x, many.to(spot.device)])
    x[2] = torch.tensor([1.0, -1.0, 0.5, 3.0], device=spot.device).repeat(width)[:width]
    out = rmsnorm_quantize(x, None, keep=keep, backend=spot.backend)
    k = round(keep * width)
    for row, codes in zip(x.cpu(), out.codes.cpu(), strict=True):
        order = sorted(range(width), key=lambda i, row=row: (-abs(row[i].item()), i))
        right = torch.zeros(width)
        right[order[:k]] = row[order[:k]]
        assert torch.equal(codes[:width], rmsnorm_quantize(right[None], None, backend="reference").codes[0, :width])
    # the largest is kept, so that masking first and quantizing first are the same
    whole = rmsnorm_quantize(x, None, backend=spot.backend)
    assert torch.equal(out.scale, whole.scale)
    assert torch.where(out.codes != 0, whole.codes, 0).equal(out.codes)


@everywhere
def test_the_widest_rows_of_equals_and_of_scattered_values_keep_half(spot):
    """Counts of 2^15 entries, which share a sum, do not run into each other."""
    width = 2**15
    x = torch.stack([torch.full((width,), 3.0), -torch.ones(width), normal(1, width)[0]]).to(spot.device)
    codes = rmsnorm_quantize(x, None, keep=0.5, backend=spot.backend).codes.cpu()
    for row in (0, 1):
        assert codes[row, : width // 2].abs().eq(127).all() and not codes[row, width // 2 :].any()
    least = x[2].abs().cpu().sort(descending=True).values[width // 2 - 1]
    assert (codes[2][x[2].abs().cpu() < least] == 0).all()


@everywhere
def test_the_residual_is_added_rounded_and_returned_before_the_norm(spot):
    dtype = torch.float16
    x, residual = (normal(5, 200, seed=s, dtype=dtype, device=spot.device) for s in (0, 1))
    gain = torch.ones(200, dtype=dtype, device=spot.device)
    out = rmsnorm_quantize(x, gain, "int4_absmean", residual=residual, backend=spot.backend)
    assert torch.equal(out.stream, x + residual)
    check(out, normed(out.stream.cpu(), gain.cpu()), "int4_absmean")


@everywhere
def test_the_squared_relu_gate_is_applied_in_float32_and_its_zeros_stay_zero(spot):
    gate, up = (normal(4, 344, seed=s, dtype=torch.float16, device=spot.device) for s in (0, 1))
    gain = normal(344, seed=2, device=spot.device).abs() + 0.5
    out = rmsnorm_quantize(gate, gain, up=up, compact=True, backend=spot.backend)
    z = up.cpu().double() * gate.cpu().double().relu() ** 2
    check(out, normed(z, gain.cpu()), "int8_absmax")
    assert not out.codes[:, :344].cpu()[gate.cpu() <= 0].any()
    for codes, places, count in zip(out.codes.cpu(), out.places.cpu(), out.counts.cpu(), strict=True):
        assert places[:count].tolist() == codes.nonzero()[:, 0].tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@everywhere
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [None, 0.25])
def test_a_value_that_is_not_finite_spoils_its_own_token_visibly(spot, value, mode, keep):
    x = normal(3, 40, device=spot.device)
    right = rmsnorm_quantize(x, None, mode, keep=keep, backend=spot.backend)
    x[1, 7] = value
    out = rmsnorm_quantize(x, None, mode, keep=keep, backend=spot.backend)
    assert out.scale[1].isnan() and not out.codes[1].any()
    assert torch.equal(out.codes[::2], right.codes[::2]) and torch.equal(out.scale[::2], right.scale[::2])
    values, _ = rmsnorm_fake_quantize(x, torch.ones(40, device=spot.device), mode, keep=keep, backend=spot.backend)
    assert values[1].isnan().all() and values[::2].isfinite().all()


@everywhere
@pytest.mark.parametrize("mode", MODES)
def test_a_token_of_zeros_stays_zero(spot, mode):
    out = rmsnorm_quantize(torch.zeros(2, 24, device=spot.device), None, mode, backend=spot.backend)
    assert not out.codes.any() and out.scale.isfinite().all() and (out.scale > 0).all()


def inputs(spot, kind):
    x = normal(7, 200, device=spot.device).requires_grad_()
    other = normal(7, 200, seed=1, device=spot.device).requires_grad_()
    gain = (normal(200, seed=2, device=spot.device).abs() + 0.5).requires_grad_()
    named = {"residual": {"residual": other}, "glu": {"up": other}, "plain": {}}[kind]
    return x, gain, named


@everywhere
@pytest.mark.parametrize("kind", ["plain", "residual", "glu"])
@pytest.mark.parametrize("keep", [None, 0.5])
def test_the_gradient_is_that_of_the_norm_alone_unclipped_and_unmasked(spot, kind, keep):
    x, gain, named = inputs(spot, kind)
    values, stream = rmsnorm_fake_quantize(x, gain, "int4_absmean", keep=keep, backend=spot.backend, **named)
    incoming = normal(7, 200, seed=3, device=spot.device)
    total = (values * incoming).sum() + (0 if stream is None else (stream * incoming.flip(0)).sum())
    leaves = [x, gain, *named.values()]
    mine = torch.autograd.grad(total, leaves)
    exact = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    z = exact[0]
    if kind == "residual":
        z = z + exact[2]
    if kind == "glu":
        z = exact[2] * z.relu() ** 2
    y = z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[1]
    right = (y * incoming.cpu().double()).sum()
    if kind == "residual":
        right = right + (z * incoming.cpu().double().flip(0)).sum()
    for a, b in zip(mine, torch.autograd.grad(right, exact), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-5)


@everywhere
@pytest.mark.parametrize("kind", ["plain", "residual", "glu"])
def test_fake_quantized_values_are_codes_times_scale(spot, kind):
    x, gain, named = inputs(spot, kind)
    with torch.no_grad():
        out = rmsnorm_quantize(x, gain, "int8_absmax", keep=0.5, backend=spot.backend, **named)
        values, stream = rmsnorm_fake_quantize(x, gain, "int8_absmax", keep=0.5, backend=spot.backend, **named)
    assert torch.equal(values, out.codes[:, :200] * out.scale[:, None])
    assert (stream is None and out.stream is None) or torch.equal(stream, out.stream)


@compiled_or_interpreted
@pytest.mark.parametrize("kind", ["plain", "residual", "glu"])
@modes
def test_the_kernels_give_the_references_codes_where_the_sums_of_the_norm_are_exact(spot, kind, mode, multiple):
    # eighths of up to 2: squares and their sums are exact in float32 in any order, so there is no tie to lose
    g = torch.Generator().manual_seed(5)
    x, other = (torch.randint(-16, 17, (4, 256), generator=g).to(spot.device) / 8.0 for _ in range(2))
    named = {"residual": {"residual": other}, "glu": {"up": other.sign()}, "plain": {}}[kind]
    for gain in (None, torch.ones(256, device=spot.device)):
        mine, right = (
            rmsnorm_quantize(x, gain, mode, multiple=multiple, eps=0.0, keep=0.5, backend=b, **named)
            for b in (spot.backend, "reference")
        )
        if gain is None:
            assert torch.equal(mine.codes, right.codes) and torch.equal(mine.scale, right.scale)
        else:  # rsqrt is another one
            assert ((mine.codes - right.codes).abs() <= 1).all()
            assert (mine.codes != right.codes).double().mean() < 0.02


@compiled_or_interpreted
def test_rows_with_a_stride_are_read_where_they_lie(spot):
    wide = normal(6, 400, device=spot.device)
    for view in (wide[:, :200], wide[::2, 100:300], wide.T[:6, :6]):
        mine, right = (rmsnorm_quantize(view, None, backend=b) for b in (spot.backend, "reference"))
        assert torch.equal(mine.codes, right.codes)


@compiled_or_interpreted
@pytest.mark.parametrize("kind", ["plain", "residual", "glu"])
def test_torch_compile_traces_both_in_one_piece_with_the_gradient(spot, kind):
    x, gain, named = inputs(spot, kind)

    def train(x, gain, named):
        values, stream = rmsnorm_fake_quantize(x, gain, "int4_absmean", keep=0.5, backend=spot.backend, **named)
        return values if stream is None else values + stream

    def run(x, gain, named):
        out = rmsnorm_quantize(x, gain, keep=0.5, compact=True, backend=spot.backend, **named)
        return out.codes, out.scale, out.counts

    leaves = [x, gain, *named.values()]
    incoming = normal(7, 200, seed=3, device=spot.device)
    for function in (train, run):
        traced = torch.compile(function, fullgraph=True, backend="aot_eager")
        mine, right = traced(x, gain, named), function(x, gain, named)
        if function is run:
            assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))
        else:
            both = (torch.autograd.grad((y * incoming).sum(), leaves) for y in (mine, right))
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@compiled_or_interpreted
def test_no_tokens_give_no_codes(spot):
    out = rmsnorm_quantize(torch.ones(0, 3, 40, device=spot.device), None, backend=spot.backend)
    assert out.codes.shape == (0, 3, 128) and out.scale.shape == (0, 3) and out.stream is None


@compiled_or_interpreted
def test_a_second_derivative_is_refused(spot):
    x = normal(2, 16, device=spot.device).requires_grad_()
    values, _ = rmsnorm_fake_quantize(x, torch.ones(16, device=spot.device), backend=spot.backend)
    (gradient,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rmsnorm_fake_quantize has no second-order gradients"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "options,error,words",
    [
        ({"mode": "int4_absmaen"}, ValueError, "did you mean 'int4_absmean'"),
        ({"mode": "int5_absmax"}, ValueError, "known: int8_absmax, int4_absmean"),
        ({"multiple": 2}, ValueError, "has no mean to multiply"),
        ({"mode": "int4_absmean", "multiple": 3}, ValueError, "1 or 2 times the mean"),
        ({"keep": 0.33}, ValueError, "no whole number of them; use 0.325"),
        ({"keep": 0.0}, ValueError, "above 0 and below 1"),
        ({"keep": 1.5}, ValueError, "above 0 and below 1"),
        ({"residual": torch.ones(2, 39)}, ValueError, "residual of shape"),
        ({"up": torch.ones(2, 40).half()}, TypeError, "give one dtype"),
        ({"up": torch.ones(2, 40), "residual": torch.ones(2, 40)}, ValueError, "give one"),
        ({"backend": "trito"}, ValueError, "did you mean 'triton'"),
        ({"eps": -1e-5}, ValueError, "eps=-1e-05; .* 0 or above"),
        ({"eps": float("nan")}, ValueError, "eps=nan; .* 0 or above"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(options, error, words):
    with pytest.raises(error, match=words):
        rmsnorm_quantize(torch.ones(2, 40), None, **options)
    with pytest.raises(TypeError, match="floating-point rows"):
        rmsnorm_quantize(torch.ones(2, 4, dtype=torch.int8), None)
    with pytest.raises(ValueError, match="gain of shape"):
        rmsnorm_quantize(torch.ones(2, 4), torch.ones(5))
