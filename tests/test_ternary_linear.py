"""Ternary linear layers: every path of the kernels gives the integers of 64-bit products, and the reference's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paperlm_kernels.rmsnorm_quantize import rmsnorm_quantize
from paperlm_kernels.ternary_linear import (
    pack_ternary,
    places_above_zero,
    sparse_columns_linear,
    sparse_rows_linear,
    ternary_gated,
    ternary_linear,
)
from support_ternary import SPOTS, activations, compiled_or_interpreted, everywhere, normal, ternary
from torch._subclasses.fake_tensor import FakeTensorMode

if len(SPOTS) > 1:
    from paperlm_kernels.ternary_linear import launch, ops

interpreted = pytest.mark.skipif(
    len(SPOTS) < 2 or SPOTS[1].device != "cpu", reason="the interpreter is what is asked for here"
)


def exact(codes, t):
    return torch.from_numpy(codes.cpu().numpy().astype(np.int64) @ t.cpu().numpy().astype(np.int64).T)


def case(spot, tokens, rows, width, seed=0):
    t = ternary(rows, width, seed)
    codes, scale = activations(tokens, width, seed)
    alpha = torch.linspace(0.25, 2.0, rows)
    return t, *(part.to(spot.device) for part in (codes, scale, alpha)), pack_ternary(t).to(spot.device)


def sums(codes):
    return codes.sum(1, dtype=torch.int32)


@everywhere
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_every_number_of_tokens_gives_the_exact_integers(spot, tokens):
    t, codes, _, _, packed = case(spot, tokens, 130, 300)
    ones = torch.ones(tokens, device=spot.device)
    acc = ternary_linear(
        codes, ones, None, packed, torch.ones(130, device=spot.device), out_dtype=torch.float32, backend=spot.backend
    )
    assert torch.equal(acc.long().cpu(), exact(codes, t))


@everywhere
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_codes_of_every_second_column_of_a_wider_matrix_are_what_is_multiplied(spot, tokens):
    t, codes, _, _, packed = case(spot, tokens, 130, 256)
    room = torch.full((tokens, 512), 7, dtype=torch.int8, device=spot.device)
    room[:, ::2] = codes
    one, ones = torch.ones(tokens, device=spot.device), torch.ones(130, device=spot.device)
    y = ternary_linear(room[:, ::2], one, None, packed, ones, out_dtype=torch.float32, backend=spot.backend)
    assert torch.equal(y.long().cpu(), exact(codes, t))


@compiled_or_interpreted
def test_shapes_that_a_compiled_model_is_traced_with_are_those_of_the_products(spot):
    _, codes, scale, alpha, packed = case(spot, 3, 130, 256)
    given = (codes, scale, sums(codes), packed.data, alpha, 130, torch.float16)
    for op in (ops.linear_op, ops.gated_op):
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given))
        y = op(*given)
        assert (fake.shape, fake.dtype) == (y.shape, y.dtype), op


@compiled_or_interpreted
@pytest.mark.parametrize("tokens,rows,width", [(1, 72, 5460), (2, 200, 3200), (3, 64, 1536), (20, 200, 5460)])
def test_the_kernels_give_the_references_bits_at_the_papers_widths(spot, tokens, rows, width):
    _, codes, scale, alpha, packed = case(spot, tokens, rows, width)
    for dtype in (torch.float32, torch.float16):
        mine = ternary_linear(codes, scale, sums(codes), packed, alpha, out_dtype=dtype, backend=spot.backend)
        right = ternary_linear(codes, scale, sums(codes), packed, alpha, out_dtype=dtype, backend="reference")
        assert torch.equal(mine, right)


@everywhere
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("byte", [1, 2])
def test_codes_may_begin_at_any_byte(spot, tokens, byte):
    """Kernels read them in words: what begins between two is copied first."""
    t, codes, _, _, packed = case(spot, tokens, 130, 256)
    room = torch.zeros(codes.numel() + byte, dtype=torch.int8, device=spot.device)
    odd = room[byte:].view(codes.shape).copy_(codes)
    one, ones = torch.ones(tokens, device=spot.device), torch.ones(130, device=spot.device)
    y = ternary_linear(odd, one, None, packed, ones, out_dtype=torch.float32, backend=spot.backend)
    assert torch.equal(y.long().cpu(), exact(codes, t))


@everywhere
@pytest.mark.parametrize(
    "tokens,rows,width", [(1, 130, 300), (1, 258, 3200), (3, 66, 300), (5, 130, 300), (40, 258, 300)]
)
def test_a_gate_and_what_it_opens_are_one_product(spot, tokens, rows, width):
    t, codes, scale, alpha, packed = case(spot, tokens, rows, width)
    mine = ternary_gated(codes, scale, None, packed, alpha, out_dtype=torch.float32, backend=spot.backend)
    whole = exact(codes, t).double() * scale.cpu().double()[:, None] * alpha.cpu().double()
    gate, up = whole[:, : rows // 2], whole[:, rows // 2 :]
    right = torch.where(gate > 0, up * gate**2, 0.0)
    assert mine.shape == (tokens, rows // 2) and (right == 0).any() and (right != 0).any()
    torch.testing.assert_close(mine.cpu().double(), right, rtol=1e-6, atol=0)
    for dtype in (torch.float32, torch.float16):
        both = [ternary_gated(codes, scale / 1000, None, packed, alpha, out_dtype=dtype, backend=backend)
                for backend in (spot.backend, "reference")]  # fmt: skip
        assert torch.equal(*both)


@compiled_or_interpreted
@pytest.mark.parametrize("tokens,tiles", [(1, None), (4, None), (20, (16, 64)), (20, (64, 256))])
@pytest.mark.parametrize("splits", [2, 3])
def test_a_split_gate_is_the_same_to_the_bit_and_a_token_that_is_no_number_stays_none(spot, tokens, tiles, splits):
    _, codes, scale, alpha, packed = case(spot, tokens, 150, 1300)
    scale[-1] = torch.nan
    whole = torch.nn.functional.pad(codes, (0, -1300 % 128))
    form = tiles and launch.Tiles(*tiles, 64, 4, 2, splits)
    mine = launch.run_linear(
        whole, scale, sums(codes), packed.data, alpha, 150, torch.float32, form, splits, gated=True
    )  # fmt: skip
    right = ternary_gated(codes, scale, None, packed, alpha, out_dtype=torch.float32, backend="reference")
    assert torch.equal(mine[:-1], right[:-1]) and mine[-1].isnan().all() and right[-1].isnan().all()


def test_a_gate_without_an_up_projection_is_refused():
    _, codes, scale, alpha, packed = case(SPOTS[0], 2, 131, 300)
    with pytest.raises(ValueError, match="131 rows of weights; a gate and an up"):
        ternary_gated(codes, scale, None, packed, alpha)


@compiled_or_interpreted
@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("step", [32, 64, 128])
def test_orientation_step_and_split_change_no_bit(spot, swap, splits, step):
    _, codes, scale, alpha, packed = case(spot, 40, 200, 1300)
    tiles = launch.Tiles(16, 64, step, 4, 2, splits, group=2, swap=swap)
    whole = torch.nn.functional.pad(codes, (0, -1300 % 128))
    mine = launch.run_linear(whole, scale, sums(codes), packed.data, alpha, 200, torch.float32, tiles)
    assert torch.equal(
        mine, ternary_linear(codes, scale, None, packed, alpha, out_dtype=torch.float32, backend="reference")
    )


def places_read(monkeypatch, do):
    """Addresses of all that kernels read in the interpreter while `do` runs."""
    from triton.runtime.interpreter import InterpreterBuilder

    read, load = [], InterpreterBuilder.create_masked_load

    def noted(self, pointers, mask, *rest):
        read.append(pointers.data[mask.data].astype(np.int64).ravel())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted)
    do()
    return np.unique(np.concatenate(read))


def offsets_in(room, places):
    """Those of them that lie in a tensor's memory, from its beginning."""
    return places[(places >= room.data_ptr()) & (places < room.data_ptr() + room.nbytes)] - room.data_ptr()


@interpreted
@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_no_tile_of_triton_reads_behind_the_rows_of_the_weights_or_the_activations(rows, swap, monkeypatch):
    # 300 rows are padded to 384, no multiple of 256; a tile of 64 tokens ends behind the 20
    _, codes, scale, alpha, packed = case(SPOTS[1], 20, 300, 500)
    whole = torch.nn.functional.pad(codes, (0, 12))
    given = (packed.data, whole, scale, sums(codes), alpha)
    rooms = [torch.cat([part.flatten()] * 3) for part in given]  # what is behind belongs to nobody
    data, x, *vectors = (room[: part.numel()].view(part.shape) for room, part in zip(rooms, given, strict=True))
    tiles = launch.Tiles(64, rows, 64, 4, 2, 2, swap=swap)
    places = places_read(
        monkeypatch, lambda: launch.run_linear(x, vectors[0], vectors[1], data, vectors[2], 300, torch.float32, tiles)
    )
    for room, size in zip(rooms, (300 * data.shape[1], x.numel(), 20, 20, 300), strict=True):
        inside = offsets_in(room, places)
        assert np.array_equal(inside, room.itemsize * np.arange(size))


@interpreted
@pytest.mark.parametrize("tokens,tiles", [(1, (16, 32, 1, 3)), (3, (8, 64, 1, 3)), (1, (8, 128, 2, 3))])
def test_triton_reads_of_few_tokens_nothing_behind_weights_activations_and_scales(tokens, tiles, monkeypatch):
    _, codes, scale, alpha, packed = case(SPOTS[1], tokens, 300, 500)
    given = (packed.data, torch.nn.functional.pad(codes, (0, 12)), scale, sums(codes), alpha)
    rooms = [torch.cat([part.flatten()] * 3) for part in given]
    data, x, scale, less, alpha = (
        room[: part.numel()].view(part.shape) for room, part in zip(rooms, given, strict=True)
    )  # fmt: skip
    few = launch.FewTiles(*tiles)
    places = places_read(monkeypatch, lambda: launch.run_linear(x, scale, less, data, alpha, 300, torch.float32, few))
    for room, nbytes in zip(rooms, (300 * data.shape[1], x.numel(), 4 * tokens, 4 * tokens, 1200), strict=True):
        inside = offsets_in(room, places)
        assert inside.size and inside.max() < nbytes


@compiled_or_interpreted
@pytest.mark.parametrize(
    "rows,width,right",
    [
        (22016, 4096, (128, 128, 1)),
        (9600, 3200, (128, 128, 1)),
        (4096, 4096, (64, 256, 1)),
        (4096, 11008, (64, 128, 5)),
    ],
)
def test_tiles_of_16_tokens_on_an_h200_are_those_that_were_the_fastest(spot, rows, width, right):
    tiles = launch.tiles_of(16, rows, width // 4, 132)
    assert (tiles.rows, tiles.step, tiles.splits) == right


@compiled_or_interpreted
@pytest.mark.parametrize(
    "rows,width,right",
    [(22016, 4096, (256, 64, 64)), (12288, 4096, (256, 64, 64)), (4096, 11008, (128, 64, 32))],
)
def test_tiles_of_256_tokens_on_an_h200_are_those_that_were_the_fastest(spot, rows, width, right):
    tiles = launch.tiles_of(256, rows, width // 4, 132)
    assert (tiles.rows, tiles.tokens, tiles.step) == right and tiles.splits == 1


@compiled_or_interpreted
@pytest.mark.parametrize("rows,right", [(22016, (32, 64, 4)), (12288, (16, 64, 2)), (4096, (8, 128, 2))])
def test_tiles_of_a_token_on_an_h200_have_as_many_rows_as_keep_it_busy(spot, rows, right):
    few = launch.few_tiles_of(1, rows, 132)
    assert (few.rows, few.words, few.warps) == right


@compiled_or_interpreted
@pytest.mark.parametrize("tokens,splits", [(1, 2), (1, 9), (4, 3)])
def test_a_split_sum_of_few_tokens_is_the_same_to_the_bit(spot, tokens, splits):
    _, codes, scale, alpha, packed = case(spot, tokens, 70, 4300)
    whole = torch.nn.functional.pad(codes, (0, -4300 % 128))
    mine = launch.run_linear(whole, scale, sums(codes), packed.data, alpha, 70, torch.float32, splits=splits)
    right = ternary_linear(codes, scale, None, packed, alpha, out_dtype=torch.float32, backend="reference")
    assert torch.equal(mine, right)


@compiled_or_interpreted
def test_weights_of_a_byte_each_for_comparison_give_the_same(spot):
    t, codes, scale, alpha, packed = case(spot, 20, 200, 384)
    padded = torch.ones(256, 384, dtype=torch.int8)
    padded[:200] = t + 1
    mine = launch.run_linear(codes, scale, sums(codes), padded.to(spot.device), alpha, 200, torch.float32)
    right = ternary_linear(codes, scale, None, packed, alpha, out_dtype=torch.float32, backend="reference")
    assert torch.equal(mine, right)


@everywhere
@pytest.mark.parametrize("mode", ["int8_absmax", "int4_absmean", "fp4_e2m1", "fp4_e1m2"])
def test_quantizing_and_multiplying_is_the_product_of_the_dequantized_matrices(spot, mode):
    x, t = normal(6, 300, device=spot.device), ternary(70, 300)
    out = rmsnorm_quantize(x, None, mode, backend=spot.backend)
    alpha = torch.full((70,), 0.3, device=spot.device)
    y = ternary_linear(
        out.codes, out.scale, out.rowsum, pack_ternary(t).to(spot.device), alpha, out_dtype=torch.float32,
        backend=spot.backend,
    )  # fmt: skip
    values = out.codes[:, :300].double().cpu() * out.scale.double().cpu()[:, None]
    torch.testing.assert_close(y.double().cpu(), values @ (0.3 * t.double()).T, rtol=1e-6, atol=1e-6)


@everywhere
@pytest.mark.parametrize("tokens,width", [(1, 300), (3, 688)])
@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_the_sparse_product_along_k_gives_the_dense_ones_bits(spot, tokens, width, keep):
    t = ternary(200, width)
    out = rmsnorm_quantize(normal(tokens, width, device=spot.device), None, keep=keep, compact=True)
    alpha = torch.linspace(0.25, 2.0, 200, device=spot.device)
    arguments = (out.codes, out.scale, out.rowsum)
    dense = ternary_linear(
        *arguments, pack_ternary(t).to(spot.device), alpha, out_dtype=torch.float16, backend="reference"
    )
    columns = pack_ternary(t.T).to(spot.device)
    lists = (out.places, out.counts)
    sparse = sparse_columns_linear(*arguments, columns, alpha, *lists, out_dtype=torch.float16, backend=spot.backend)
    assert (out.counts <= keep * width).all() and torch.equal(sparse, dense)


@compiled_or_interpreted
def test_a_split_sparse_sum_and_an_empty_list_are_right(spot):
    t = ternary(200, 688)
    out = rmsnorm_quantize(normal(3, 688, device=spot.device), None, keep=0.5, compact=True)
    out.counts[1] = 0  # its list is empty: nothing but the sum of the codes is left
    alpha = torch.ones(200, device=spot.device)
    columns = pack_ternary(t.T).to(spot.device)
    lists = (out.places, out.counts)
    arguments = (out.codes, out.scale, out.rowsum)
    right = sparse_columns_linear(*arguments, columns, alpha, *lists, out_dtype=torch.float32, backend="reference")
    for splits in (1, 3):
        mine = launch.run_columns(*arguments, columns.data, alpha, 200, torch.float32, *lists, splits=splits)
        assert torch.equal(mine, right)


@everywhere
@pytest.mark.parametrize("tokens", [1, 3])
def test_only_the_rows_behind_an_open_gate_are_computed_and_the_others_are_zero(spot, tokens):
    _, codes, scale, alpha, packed = case(spot, tokens, 150, 300)
    gate = normal(tokens, 150, seed=4, device=spot.device)
    gate[0] = gate[0] if tokens == 1 else -1.0  # one token with no open gate at all
    same = {"out_dtype": torch.float16}
    dense = ternary_linear(codes, scale, None, packed, alpha, backend="reference", **same)
    lists = places_above_zero(gate, backend=spot.backend)
    for row, places, count in zip(gate.cpu(), *(part.cpu() for part in lists), strict=True):
        assert places[:count].tolist() == (row > 0).nonzero()[:, 0].tolist()
    sparse = sparse_rows_linear(codes, scale, None, packed, alpha, *lists, backend=spot.backend, **same)
    assert torch.equal(sparse, torch.where(gate > 0, dense, 0))


@everywhere
@pytest.mark.parametrize("width", [1, 16384, 32768])
def test_a_list_of_gates_that_are_all_open_counts_them_all(spot, width):
    places, counts = (
        part.cpu() for part in places_above_zero(torch.ones(1, width, device=spot.device), backend=spot.backend)
    )
    assert counts.tolist() == [width] and torch.equal(places, torch.arange(width, dtype=torch.int32)[None])


@everywhere
@pytest.mark.parametrize("given", [False, True])
def test_what_stands_in_the_padding_of_the_codes_meets_weights_of_zero(spot, given):
    packed = pack_ternary(ternary(64, 300)).to(spot.device)
    codes, scale = (part.to(spot.device) for part in activations(5, 384, seed=3))
    rowsum = codes.sum(-1, dtype=torch.int32) if given else None
    alpha = torch.tensor(1.0, device=spot.device)
    y = ternary_linear(codes, scale, rowsum, packed, alpha, out_dtype=torch.float32, backend=spot.backend)
    exact = codes[:, :300].cpu().long() @ ternary(64, 300).long().T
    assert torch.equal(y.cpu(), exact.float() * scale.cpu()[:, None])


def test_autocast_does_not_round_the_integers():
    codes = torch.randint(60, 128, (4, 2048), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed, scale = pack_ternary(ternary(64, 2048)), torch.ones(4)
    right = ternary_linear(codes, scale, None, packed, torch.tensor(1.0), out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ternary_linear(codes, scale, None, packed, torch.tensor(1.0), out_dtype=torch.float32)
    assert torch.equal(y, right) and torch.equal(y, (codes.long() @ ternary(64, 2048).long().T).float())


@pytest.mark.parametrize("name", ["codes", "act_scale", "rowsum", "alpha"])
def test_a_number_in_the_place_of_a_tensor_is_refused(name):
    _, codes, scale, alpha, packed = case(SPOTS[0], 3, 150, 300)
    given = {"codes": codes, "act_scale": scale, "rowsum": None, "alpha": alpha} | {name: 1.0}
    with pytest.raises(TypeError, match=rf"{name} is a float; give a tensor: torch.tensor\({name}\)"):
        ternary_linear(packed=packed, **given)


def test_lists_that_do_not_fit_the_tokens_are_refused():
    _, codes, scale, alpha, packed = case(SPOTS[0], 3, 150, 300)
    places, counts = places_above_zero(torch.ones(3, 150))
    with pytest.raises(TypeError, match="both are int32"):
        sparse_rows_linear(codes, scale, None, packed, alpha, places.long(), counts)
    with pytest.raises(ValueError, match="a list and a number for each token"):
        sparse_rows_linear(codes, scale, None, packed, alpha, places[:2], counts)
    with pytest.raises(ValueError, match="for weights of 300 x 150"):  # the copy along N was meant
        sparse_columns_linear(codes, scale, None, packed, alpha, places, counts)


@compiled_or_interpreted
def test_no_tokens_give_no_rows(spot):
    _, codes, scale, alpha, packed = case(spot, 1, 130, 300)
    assert ternary_linear(
        codes[:0], scale[:0], None, packed, alpha, out_dtype=torch.float16, backend=spot.backend
    ).shape == (0, 130)


@compiled_or_interpreted
def test_it_can_be_traced_by_torch_compile_in_one_piece(spot):
    _, codes, scale, alpha, packed = case(spot, 2, 130, 300)

    def call(codes, scale):
        return ternary_linear(codes, scale, None, packed, alpha, out_dtype=torch.float32, backend=spot.backend)

    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(codes, scale), call(codes, scale))


@interpreted
def test_triton_in_the_interpreter_refuses_bfloat16_which_it_rounds_wrongly():
    _, codes, scale, alpha, packed = case(SPOTS[1], 1, 130, 300)
    with pytest.raises(ValueError, match="interpret it in float16 or float32"):
        ternary_linear(codes, scale, None, packed, alpha, backend="triton")
