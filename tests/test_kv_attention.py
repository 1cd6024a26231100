"""Keys and values in few bits: bytes of a row, codes against float64, attention against that over what is stored."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from paperlm_kernels.kv_attention import KVLayout, QuantizedKV, pack_heads, quantize_heads, unpack_heads
from support_ternary import SPOTS, compiled_or_interpreted, everywhere, normal

if len(SPOTS) > 1:
    from paperlm_kernels.kv_attention import launch

HEADS = (64, 100, 128)
MAPPINGS = ("symmetric", "minmax")
layouts = pytest.mark.parametrize("bits,mapping", [(bits, mapping) for bits in (4, 3) for mapping in MAPPINGS])


def angles(batch, start, count, width, theta=10000.0):
    """cos, sin (batch, count, width / 2) of positions from `start` on, float64."""
    rate = theta ** (-2.0 * torch.arange(width // 2, dtype=torch.float64) / width)
    angle = (start + torch.arange(count, dtype=torch.float64))[:, None] * rate
    return angle.cos().expand(batch, -1, -1), angle.sin().expand(batch, -1, -1)


def turn(x, cos, sin):
    """(B, T, heads, D) as complex numbers, first half and second, times e^(i angle)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    z = z * torch.complex(cos, sin)[:, :, None]
    return torch.cat([z.real, z.imag], -1)


def oracle(x, bits, mapping):
    """Values of the formulas and x in steps, float64."""
    x = x.double()
    top = x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    if mapping == "symmetric":
        step = top / (2 ** (bits - 1) - 1)
        return (x / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step, x / step, step
    step = 2 * top / (2**bits - 1)
    return ((x + top) / step).round() * step - top, (x + top) / step, step


def attention(q, keys, values, scale):
    """q (B, H, D) over keys, values (B, heads, length, D), float64."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = keys.double().repeat_interleave(repeat, 1), values.double().repeat_interleave(repeat, 1)
    shares = torch.softmax(torch.einsum("bhd,bhtd->bht", q.double(), keys) * scale, -1)
    return torch.einsum("bht,bhtd->bhd", shares, values)


def filled(spot, length, head_dim, *, batch=1, heads=1, bits=4, mapping="symmetric", seed=0, **options):
    """A cache with `length` random positions, and the keys and values that were given to it."""
    cache = QuantizedKV.empty(
        batch, heads, head_dim, max(length, 1), bits=bits, mapping=mapping, device=spot.device, **options
    )
    k, v = (normal(batch, length, heads, head_dim, seed=seed + i, device=spot.device) for i in range(2))
    cache.append(k, v, backend="reference")
    return cache, k, v


@layouts
@pytest.mark.parametrize("head_dim", HEADS)
def test_packing_round_trips_in_the_bytes_that_the_layout_says(bits, mapping, head_dim):
    layout = KVLayout(head_dim, bits, mapping)
    u = torch.randint(0, 2**bits, (2, 3, head_dim), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    data = pack_heads(u, layout)
    assert data.shape[-1] == layout.row_bytes == {4: head_dim // 2, 3: head_dim // 4 + -(-head_dim // 8)}[bits]
    assert torch.equal(unpack_heads(data, layout), u)
    with pytest.raises(ValueError, match=f"take {layout.row_bytes}"):
        unpack_heads(data[..., 1:], layout)


def test_rows_of_three_bits_take_48_24_and_25_plus_13_bytes_and_a_token_what_the_paper_sizes_imply():
    rows = {d: [planes.size for planes in KVLayout(d, 3).planes] for d in (128, 64, 100)}
    assert rows == {128: [32, 16], 64: [16, 8], 100: [25, 13]}
    # bytes of a token and layer with float16 steps: 700M, 1.3B, 3B, 7B
    for heads, head_dim, four, three in ((24, 64, 1632, 1248), (32, 64, 2176, 1664), (32, 100, 3328, 2560),
                                         (32, 128, 4224, 3200)):  # fmt: skip
        for bits, right in ((4, four), (3, three)):
            assert QuantizedKV.empty(1, heads, head_dim, 1, bits=bits).bytes_per_token == right


def test_the_low_half_of_a_byte_is_the_first_half_of_the_head_and_three_bits_lie_in_two_planes():
    u = torch.arange(8, dtype=torch.uint8)
    assert pack_heads(u, KVLayout(8, 4)).tolist() == [4 << 4, 1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4]
    # low two bits of 0, 2, 4, 6 and of 1, 3, 5, 7; then the highest bits of 0 .. 7 in one byte
    assert pack_heads(u, KVLayout(8, 3)).tolist() == [0b10001000, 0b11011101, 0b11110000]


@layouts
@pytest.mark.parametrize("width", [64, 100])
def test_codes_are_those_of_the_formulas_but_at_ties(bits, mapping, width):
    x = normal(500, width)
    u, step = quantize_heads(x, bits, mapping)
    values, exact, right = oracle(x, bits, mapping)
    zero = 2 ** (bits - 1) if mapping == "symmetric" else (2**bits - 1) / 2
    tie = ((exact - exact.floor()) - 0.5).abs() < 1e-5
    mine = (u.double() - zero) * step[:, None].double()
    assert (((mine - values).abs() < 1e-5 * right) | tie).all() and tie.double().mean() < 1e-3
    assert u.max() <= 2**bits - 1 and (mapping == "symmetric" or set(u.unique().tolist()) == set(range(2**bits)))


@pytest.mark.parametrize(
    "bits,mapping,right", [(4, "symmetric", 0.0138), (4, "minmax", 0.0120), (3, "symmetric", 0.0750),
                           (3, "minmax", 0.0551)],
)  # fmt: skip
def test_relative_errors_on_gaussian_heads_are_those_that_the_mappings_have(bits, mapping, right):
    x = normal(20000, 128)
    u, step = quantize_heads(x, bits, mapping)
    zero = 2 ** (bits - 1) if mapping == "symmetric" else (2**bits - 1) / 2
    values = (u.double() - zero) * step[:, None].double()
    assert ((values - x) ** 2).sum().item() / (x.double() ** 2).sum().item() == pytest.approx(right, rel=0.01)


@everywhere
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("groups", [1, 3])
def test_queries_are_turned_by_the_same_angles_and_lengths_that_layers_share_stay(spot, head_dim, groups):
    cache, alone = (QuantizedKV.empty(2, 2, head_dim, 7, bits=4, device=spot.device) for _ in range(2))
    k, v = (normal(2, 3, 2, head_dim, seed=i, device=spot.device) for i in range(2))
    q = normal(2, 3, 3 * 2 * groups, head_dim, seed=2, device=spot.device)[:, :, ::3]  # a slice, as of a fused product
    cos, sin = angles(2, 0, 3, head_dim)
    turning = [a.float().to(spot.device) for a in (cos, sin)]
    turned = cache.append(k, v, *turning, q=q, advance=False, backend=spot.backend)
    assert turned.shape == q.shape and cache.lengths.tolist() == [0, 0]
    torch.testing.assert_close(turned.cpu().double(), turn(q.cpu(), cos, sin), rtol=1e-5, atol=1e-5)
    assert alone.append(k, v, *turning, backend=spot.backend) is None and alone.lengths.tolist() == [3, 3]
    assert torch.equal(cache.k_data, alone.k_data) and torch.equal(cache.v_steps, alone.v_steps)


@pytest.mark.parametrize("shape", [(2, 1, 3, 8), (2, 1, 2, 4), (2, 2, 2, 8)])
def test_queries_that_do_not_fit_the_keys_are_refused(shape):
    cache, k = QuantizedKV.empty(2, 2, 8, 7), torch.ones(2, 1, 2, 8)
    with pytest.raises(ValueError, match="multiple of 2, 8"):
        cache.append(k, k, torch.ones(2, 1, 4), torch.zeros(2, 1, 4), q=torch.ones(shape))
    with pytest.raises(ValueError, match="cos and"):
        cache.append(k, k, q=k)


@everywhere
@layouts
@pytest.mark.parametrize("head_dim", HEADS)
def test_appending_rotates_the_keys_quantizes_and_packs(spot, bits, mapping, head_dim):
    cache = QuantizedKV.empty(
        2, 2, head_dim, 7, bits=bits, mapping=mapping, step_dtype=torch.float32, device=spot.device
    )
    k, v = (normal(2, 5, 2, head_dim, seed=i, device=spot.device) for i in range(2))
    cos, sin = angles(2, 0, 5, head_dim)
    for part in (slice(0, 1), slice(1, 5)):
        turning = (a[:, part].float().to(spot.device) for a in (cos, sin))
        cache.append(k[:, part], v[:, part], *turning, backend=spot.backend)
    assert cache.lengths.tolist() == [5, 5]
    keys, values = (part.cpu() for part in cache.dequantized())
    for mine, exact in ((keys, turn(k.cpu(), cos, sin)), (values, v.cpu())):
        exact = exact.transpose(1, 2)
        for start, stop, width in ((0, 1, 4), (1, 5, bits)):
            right, in_steps, step = oracle(exact[:, :, start:stop], width, mapping)
            tie = ((in_steps - in_steps.floor()) - 0.5).abs() < 1e-4
            near = (mine[:, :, start:stop].double() - right).abs() < 1e-4 * step
            assert (near | tie).all() and tie.double().mean() < 0.01


@everywhere
def test_a_code_is_the_nearest_even_right_next_to_a_tie(spot):
    above, below = (
        0.5 + 2**-24,
        1.5 - 2**-23,
    )  # the neighbours of 0.5 and 1.5 in float32; with a largest of 3 a step is 1
    x = torch.tensor([3.0, above, -above, below, -below, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.0], device=spot.device)
    cache = QuantizedKV.empty(1, 1, 12, 1, bits=3, first_bits=3, device=spot.device)
    cache.append(x.view(1, 1, 1, 12), x.view(1, 1, 1, 12), backend=spot.backend)
    assert cache.dequantized()[0].flatten().tolist() == [3, 1, -1, 1, -1, 0, 0, 2, -2, 2, -2, 0]


@compiled_or_interpreted
@layouts
def test_the_kernel_appends_the_bytes_of_the_reference_where_nothing_is_turned(spot, bits, mapping):
    right, k, v = filled(spot, 4, 100, batch=2, heads=2, bits=bits, mapping=mapping)
    mine = QuantizedKV.empty(2, 2, 100, 4, bits=bits, mapping=mapping, device=spot.device)
    for t in range(4):
        mine.append(k[:, t : t + 1], v[:, t : t + 1], backend=spot.backend)
    for name in ("k_data", "v_data", "k_steps", "v_steps", "lengths", "k_first", "v_first"):
        a, b = getattr(mine, name), getattr(right, name)
        if name.endswith("_data") and right.layout.has_first:
            a, b = a[:, :, 1:], b[:, :, 1:]  # position 0 lies apart
        assert (a is None and b is None) or torch.equal(a, b), name


# rows of three bits are words (64, 128), or bytes, an even number of them (100) or an odd one (8, 40), or two (4)
LENGTHS = [(1, 64), (2, 100), (127, 64), (128, 100), (129, 128), (70, 40), (33, 8), (65, 4)]


@everywhere
@layouts
@pytest.mark.parametrize("length,head_dim", LENGTHS)
def test_decoding_is_attention_over_the_values_that_are_stored(spot, bits, mapping, length, head_dim):
    cache, k, v = filled(spot, length, head_dim, batch=1, heads=1, bits=bits, mapping=mapping)  # batches: below
    q = normal(1, 2, head_dim, seed=7, device=spot.device)
    out = cache.decode(q, backend=spot.backend)
    right = attention(q.cpu(), *(part.cpu() for part in cache.dequantized()), head_dim**-0.5)
    assert (out.cpu().double() - right).norm() < 1e-5 * right.norm()
    # and but for steps in float16 that of the quantized keys and values themselves
    first = 4 if cache.layout.has_first else bits
    exact = []
    for part in (k.cpu().transpose(1, 2), v.cpu().transpose(1, 2)):
        exact.append(
            torch.cat([oracle(part[:, :, :1], first, mapping)[0], oracle(part[:, :, 1:], bits, mapping)[0]], 2)
        )
    right = attention(q.cpu(), *exact, head_dim**-0.5)
    assert (out.cpu().double() - right).norm() < 2e-3 * right.norm()


@pytest.mark.parametrize("length", [2049, 8192])
@pytest.mark.parametrize("bits", [3, 4])
def test_the_reference_decodes_long_sequences(length, bits):
    cache, _, _ = filled(SPOTS[0], length, 100, bits=bits)
    q = normal(1, 2, 100, seed=7)
    right = attention(q, *cache.dequantized(), 0.1)
    assert (cache.decode(q, scale=0.1, backend="reference").double() - right).norm() < 1e-5 * right.norm()


@compiled_or_interpreted
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("splits,head_dim", [(1, 64), (2, 64), (5, 64), (16, 64), (1, 100), (7, 100)])
def test_any_split_of_the_positions_gives_the_same_attention(spot, bits, splits, head_dim):
    cache, _, _ = filled(spot, 300 if head_dim == 64 else 150, head_dim, bits=bits)
    q = normal(1, 2, head_dim, seed=7, device=spot.device)
    out = launch.run_decode(q, *cache._tensors(), cache.layout, 16, 0.125, splits)
    right = attention(q.cpu(), *(part.cpu() for part in cache.dequantized()), 0.125)
    assert (out.cpu().double() - right).norm() < 1e-5 * right.norm()


@compiled_or_interpreted
def test_positions_are_divided_until_every_multiprocessor_has_32_warps_but_into_no_part_of_less_than_4_steps(
    spot, monkeypatch
):
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    tiles = launch.tiles_of(KVLayout(128, 4))
    assert tiles.warps == 1
    for sequences, capacity, right in (
        (16, 4096, 8),
        (1, 4096, 64),
        (1, 256, 256 // (4 * tiles.tokens)),
        (200, 4096, 1),
    ):
        assert launch.splits_of(32 * sequences, capacity, tiles, spot.device) == right


@everywhere
@pytest.mark.parametrize("bits,head_dim", [(3, 64), (4, 64), (3, 100)])
def test_each_sequence_attends_to_its_own_length_and_an_empty_one_gives_zeros(spot, bits, head_dim):
    cache, _, _ = filled(spot, 40, head_dim, batch=4, bits=bits)
    cache.lengths.copy_(torch.tensor([0, 1, 17, 40]))
    q = normal(4, 1, head_dim, seed=7, device=spot.device)
    out = cache.decode(q, scale=0.125, backend=spot.backend).cpu()
    keys, values = (part.cpu() for part in cache.dequantized())
    assert not out[0].any()
    for b, length in ((1, 1), (2, 17), (3, 40)):
        right = attention(q[b : b + 1].cpu(), keys[b : b + 1, :, :length], values[b : b + 1, :, :length], 0.125)
        assert (out[b].double() - right[0]).norm() < 1e-5 * right.norm()


@everywhere
@pytest.mark.parametrize("bits,head_dim", [(4, 16), (3, 32), (3, 20)])
def test_positions_beyond_the_capacity_which_a_gpu_does_not_look_at_add_nothing(spot, bits, head_dim):
    cache, _, _ = filled(spot, 8, head_dim, heads=2, bits=bits)
    q = normal(1, 2, head_dim, seed=7, device=spot.device)
    full = cache.decode(q, backend=spot.backend)
    cache.lengths += 4  # what is left there by `append` of four more
    assert torch.equal(cache.decode(q, backend=spot.backend), full)


def test_attention_under_autocast_is_in_float32_all_the_same():
    cache, _, _ = filled(SPOTS[0], 40, 64, heads=2)
    q = normal(1, 2, 64, seed=7)
    right = cache.decode(q, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cache.decode(q, backend="reference"), right)


@everywhere
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_query_in_four_bits_is_quantized_by_the_caches_mapping(spot, mapping):
    for bits in (3, 4):
        cache, _, _ = filled(spot, 20, 100, bits=bits, mapping=mapping)
        q = normal(1, 2, 100, seed=9, device=spot.device)
        out = cache.decode(q, q_bits=4, backend=spot.backend)
        values, _, _ = oracle(q.cpu(), 4, mapping)
        right = attention(values, *(part.cpu() for part in cache.dequantized()), 0.1)
        assert (out.cpu().double() - right).norm() < 1e-5 * right.norm()


@everywhere
def test_the_first_position_is_finer_than_the_others_in_three_bits(spot):
    errors = {}
    for first_bits in (3, 4):
        cache = QuantizedKV.empty(1, 1, 128, 2, bits=3, first_bits=first_bits, device=spot.device)
        k = normal(1, 2, 1, 128, device=spot.device)
        cache.append(k, k, backend=spot.backend)
        keys, _ = cache.dequantized()
        errors[first_bits] = ((keys[0, 0] - k[0, :, 0]) ** 2).sum(-1) / (k[0, :, 0] ** 2).sum(-1)
    assert errors[4][0] < 0.4 * errors[3][0] and errors[4][1] == errors[3][1]


@everywhere
@layouts
def test_zeros_and_numbers_far_below_the_smallest_top_have_the_codes_of_zero_and_the_step_of_that_top(
    spot, bits, mapping
):
    k = torch.zeros(1, 2, 1, 64, device=spot.device)
    k[0, 1] = 1e-8
    cache = QuantizedKV.empty(1, 1, 64, 2, bits=bits, mapping=mapping, first_bits=bits, device=spot.device)
    cache.append(k, k, backend=spot.backend)
    values, _, step = oracle(k[0, :, 0].cpu(), bits, mapping)
    for stored in cache.dequantized():
        found = stored.reshape(2, 64).cpu().double()
        assert (found - values).abs().max() <= 0.05 * step.max() and found.isfinite().all()
    codes, steps = quantize_heads(k[0, :, 0].cpu(), bits, mapping)
    right = (
        torch.zeros(2, 64).add(2 ** (bits - 1)) if mapping == "symmetric" else ((2**bits - 1) / 2 + 0 * codes).round()
    )
    assert torch.equal(codes.float(), right.float()) and torch.allclose(steps.double(), step[:, 0], rtol=1e-3)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@layouts
def test_a_row_with_a_value_that_is_not_finite_has_codes_of_0_and_no_step(bits, mapping, wrong):
    x = normal(2, 8)
    x[0, 3] = wrong
    u, step = quantize_heads(x, bits, mapping)
    assert not u[0].any() and step[0].isnan() and u[1].any() and step[1].isfinite()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@everywhere
@pytest.mark.parametrize("bits", [3, 4])
def test_a_key_that_is_not_finite_is_seen_in_the_result(spot, bits):
    cache = QuantizedKV.empty(1, 1, 64, 3, bits=bits, device=spot.device)
    k = normal(1, 3, 1, 64, device=spot.device)
    k[0, 1, 0, 5] = math.inf
    cache.append(k, k.nan_to_num(posinf=1.0), backend=spot.backend)
    assert cache.decode(normal(1, 1, 64, device=spot.device), backend=spot.backend).isnan().all()


def test_what_is_not_supported_and_what_does_not_fit_is_refused():
    for options, words in (
        ({"bits": 2}, "3 and 4 are supported"),
        ({"bits": 8}, "3 and 4 are supported"),
        ({"first_bits": 8}, "3 or 4 bits"),
        ({"bits": 4, "first_bits": 3}, "position 0 has at least as many; give first_bits=4"),
        ({"mapping": "symetric"}, "did you mean 'symmetric'"),
        ({"step_dtype": torch.bfloat16}, "float16 or float32"),
    ):
        with pytest.raises(ValueError, match=words):
            QuantizedKV.empty(1, 1, 64, 8, **options)
    for sizes in ((0, 2, 64, 8), (1, -1, 64, 8), (1, 2, 64, -1)):
        with pytest.raises(ValueError, match="; a cache has room for 1 or more"):
            QuantizedKV.empty(*sizes)
    with pytest.raises(ValueError, match="a multiple of 4"):
        QuantizedKV.empty(1, 1, 90, 8)
    cache, k, _ = filled(SPOTS[0], 4, 64)
    for call, error, words in (
        (lambda: cache.append(k, k), ValueError, r"4 \+ 4 positions in a cache for 4"),
        (lambda: cache.append(k[..., :60], k[..., :60]), ValueError, r"this cache takes \(1, T, 1, 64\)"),
        (lambda: cache.append(k.int(), k.int()), TypeError, "floating point"),
        (lambda: cache.append(k, k, cos=k), ValueError, "one of cos and sin alone"),
        (lambda: cache.append(k, k, k[0], k[0]), ValueError, "cos of shape"),
        (lambda: cache.decode(k[0, 0]), ValueError, "q of shape"),
        (lambda: cache.decode(k[:, 0], q_bits=8), ValueError, r"16 \(as it is\) or 4 bits"),
        (lambda: cache.decode(k[:, 0], q_bits=4.0), ValueError, r"q_bits=4\.0"),
    ):
        with pytest.raises(error, match=words):
            call()
    with pytest.raises(ValueError, match="k_data of shape"):
        QuantizedKV(KVLayout(64, 3), cache.k_data, cache.v_data, cache.k_steps, cache.v_steps, cache.lengths)
    with pytest.raises(ValueError, match=r"k_steps of shape .* contiguous"):  # kernels would read other rows
        two = QuantizedKV.empty(1, 2, 64, 4)
        dataclasses.replace(two, k_steps=torch.zeros(1, 4, 2, dtype=torch.float16).transpose(1, 2))
    with pytest.raises(ValueError, match="k_first of shape"):
        three = QuantizedKV.empty(1, 1, 64, 4, bits=3)
        QuantizedKV(three.layout, three.k_data, three.v_data, three.k_steps, three.v_steps, three.lengths)
