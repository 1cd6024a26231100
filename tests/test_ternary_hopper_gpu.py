"""The product by Hopper's copy engine gives the reference's bits: on a card, in every form it takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paperlm_kernels.ternary_linear import hopper, pack_ternary, ternary_gated, ternary_linear
from paperlm_kernels.ternary_linear.hopper import StreamTiles
from paperlm_kernels.ternary_linear.launch import run_linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DEVICE = "cuda"
SIZES = ((16, 64, 4, 4), (16, 64, 4, 3), (16, 64, 2, 4), (32, 64, 4, 4), (64, 64, 2, 4), (64, 128, 2, 3))
FORMS = [StreamTiles(*size) for size in SIZES]


class Problem:
    """Operands of a product on the card, and what the reference makes of them."""

    def __init__(self, tokens, rows, columns, dtype=torch.bfloat16, seed=0):
        g = torch.Generator(DEVICE).manual_seed(seed)
        self.codes = torch.randint(-128, 128, (tokens, columns), generator=g, device=DEVICE, dtype=torch.int8)
        self.scale = torch.rand(tokens, generator=g, device=DEVICE) + 0.5
        self.packed = pack_ternary(torch.randint(-1, 2, (rows, columns), generator=g, device=DEVICE, dtype=torch.int8))
        self.alpha = torch.rand(rows, generator=g, device=DEVICE) + 0.5
        self.rowsum = self.codes.sum(1, dtype=torch.int32)
        self.dtype = dtype
        self.right = self.product("reference")

    def product(self, backend="triton"):
        given = (self.codes, self.scale, self.rowsum, self.packed, self.alpha)
        return ternary_linear(*given, out_dtype=self.dtype, backend=backend)

    def by(self, tiles):
        width = 4 * self.packed.data.shape[1]
        codes = torch.nn.functional.pad(self.codes, (0, width - self.codes.shape[1])).contiguous()
        given = (codes, self.scale, self.rowsum, self.packed.data, self.alpha, self.packed.out_features, self.dtype)
        return run_linear(*given, tiles)


@pytest.mark.parametrize("tiles", FORMS, ids=str)
@pytest.mark.parametrize("tokens,rows,columns", [(5, 128, 128), (16, 300, 688), (70, 1000, 5460), (130, 129, 11008)])
def test_every_form_of_tiles_gives_the_references_bits_shared_and_alone(tiles, tokens, rows, columns):
    p = Problem(tokens, rows, columns)
    for splits in range(1, hopper.most_splits(tiles) + 1):
        assert torch.equal(p.by(dataclasses.replace(tiles, splits=splits)), p.right), splits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "rows,columns", [(4096, 11008), (22016, 4096), (3200, 8640), (10920, 2048), (1000, 200), (7, 5460)]
)
def test_what_is_chosen_gives_the_references_bits(rows, columns, dtype):
    for tokens in (5, 16, 17, 33, 64, 65, 256, 500, 1025):
        p = Problem(tokens, rows, columns, dtype)
        assert torch.equal(p.product(), p.right) and torch.equal(p.product(), p.right), tokens


def test_a_hundred_launches_on_each_of_two_streams_at_once_give_the_same_bits():
    p, q = Problem(16, 4096, 11008), Problem(16, 4096, 11008, seed=1)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        for stream, problem in zip(streams, (p, q), strict=True):
            with torch.cuda.stream(stream):
                found.append((problem, problem.product()))
    torch.cuda.synchronize()
    assert all(torch.equal(y, problem.right) for problem, y in found)


def test_two_graphs_with_shared_sums_replayed_at_once_give_the_same_bits():
    p, q, small, graphs = Problem(16, 4096, 11008), Problem(16, 4096, 11008, seed=1), Problem(16, 1536, 4096), []
    order = (small, p, q, small, p, Problem(40, 4096, 11008), q)  # a later one needs more memory; no two alike in a row
    for problem in order:
        problem.product()
    torch.cuda.synchronize()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [problem.product() for problem in order]
        graphs.append((graph, outputs, torch.cuda.Stream()))
    for _ in range(50):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, outputs, _ in graphs:
        assert all(torch.equal(y, problem.right) for y, problem in zip(outputs, order, strict=True))


@pytest.mark.parametrize("room", [True, False])
def test_a_graph_captured_with_and_without_a_product_before_gives_the_references_bits(room, monkeypatch):
    p = Problem(16, 4096, 11008)
    monkeypatch.setattr(hopper, "_ROOM", {})
    if room:
        p.product()
        assert hopper._ROOM
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = [p.product() for _ in range(3)]
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, p.right) for one in y)


def test_a_replay_that_finds_sums_that_are_no_zeros_gives_the_references_bits():
    p = Problem(16, 4096, 11008)
    p.product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = [p.product() for _ in range(3)]
    next(reversed(hopper._CAPTURED.values())).fill_(3)  # as after a replay that was broken off
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, p.right) for one in y)


@pytest.mark.parametrize("tokens", [16, 64])
def test_shared_sums_are_zeros_again_and_nothing_behind_them_is_written(tokens, monkeypatch):
    p, given = Problem(tokens, 4096, 11008), []

    def parts(numbers, device):
        room = torch.zeros(numbers + 65536, dtype=torch.int32, device=device)
        room[numbers:] = 7
        given.append((room, numbers))
        return room[:numbers]

    monkeypatch.setattr(hopper, "_parts", parts)
    assert torch.equal(p.product(), p.right)
    torch.cuda.synchronize()
    ((room, numbers),) = given
    assert not room[:numbers].any() and (room[numbers:] == 7).all()


def test_what_torch_compile_captures_gives_the_references_bits():
    p = Problem(16, 4096, 11008)
    compiled = torch.compile(p.product, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(), p.right)


@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_weights_that_are_written_just_before_a_product_are_the_ones_it_reads(tokens):
    p, q = Problem(tokens, 4096, 4096), Problem(tokens, 4096, 4096)
    q.packed = Problem(tokens, 4096, 4096, seed=1).packed
    q.right = q.product("reference")
    first, second = p.packed.data.clone(), q.packed.data.clone()
    for _ in range(20):
        for data, right in ((second, q.right), (first, p.right)):
            p.packed.data.copy_(data)
            assert torch.equal(p.product(), right)


def test_weights_are_read_early_from_the_second_product_on_and_not_after_a_write():
    p = Problem(16, 256, 256)
    p.product()
    assert hopper.settled(p.packed.data)
    p.packed.data.add_(0)
    assert not hopper.settled(p.packed.data) and hopper.settled(p.packed.data)


def test_what_the_copy_engine_cannot_read_is_taken_by_the_other_kernel():
    p = Problem(16, 300, 256)
    room = torch.empty(16 * 256 + 16, dtype=torch.int8, device=DEVICE)
    p.codes = room[4 : 4 + 16 * 256].view(16, 256).copy_(p.codes)
    assert not hopper.applies(p.codes, p.packed.data) and hopper.applies(p.codes.clone(), p.packed.data)
    assert torch.equal(p.product(), p.right)


@pytest.mark.parametrize("rows,columns", [(22016, 4096), (17280, 3200), (10920, 2048), (256, 300), (30, 128)])
def test_a_gated_product_gives_the_references_bits(rows, columns):
    for tokens in (5, 16, 33, 64, 256, 300):
        p = Problem(tokens, rows, columns)
        given = (p.codes, p.scale, p.rowsum, p.packed, p.alpha)
        for dtype in (torch.bfloat16, torch.float32):
            mine, right = (ternary_gated(*given, out_dtype=dtype, backend=b) for b in ("triton", "reference"))
            assert torch.equal(mine, right), (tokens, dtype)
