"""Host side of the kernels: tiles, grids and buffers. Nothing here waits for the device.

Tiles of 1, of 5 to 16 and of 256 tokens are the best of `bench.ops.ternary_linear.sweep` on an H200, at matrices of 7B
and 3B; those of other numbers of tokens follow from these by arithmetic and have not been measured. What Hopper's copy
engine can read of more tokens than GEMV_TOKENS goes to `hopper`, whatever is said here of such cards.
"""

from __future__ import annotations

import dataclasses
import os

import torch
import triton
from torch import Tensor

from paperlm_kernels.overlap import is_hopper, launched, overlaps
from paperlm_kernels.ternary_linear import gemm, gemv, hopper
from paperlm_kernels.ternary_linear.hopper import StreamTiles
from paperlm_kernels.ternary_linear.packing import padded

GEMV_TOKENS = 4
"Up to so many tokens are taken by the dot products of four bytes, more by the matrix units."
MOST_AHEAD = 12_000_000
"""Bytes of weights that are asked for while a norm is in front: about what memory brings in that time. Microseconds of
norm and product of one token, H200, with and without: of 11.3 MB (down of 7B) 7.5 and 8.5, of 5.6 (gate_up of 1.3B)
4.8 and 5.2; of 12.6 (qkv of 7B) 7.4 and 7.3, of 13.8 (gate_up of 3B) 8.4 and 8.1, of 22.5 (gate_up of 7B) 10.7 and
9.7. Behind another product, with which memory is busy, it takes longer: qkv of 3B, 7.7 MB, 8.4 and 4.8. Two runs; of
what is left out there are no rows."""
SHARED = 227 * 1024
"Bytes of shared memory of a program, on Hopper."
ASM = os.environ.get("TRITON_INTERPRET") != "1"
"The interpreter has no inline assembly."


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the matrix units: tokens, weight rows, bytes of a row a step; and how many tiles of tokens go together."""

    tokens: int
    rows: int
    step: int
    warps: int
    stages: int
    splits: int = 1
    group: int = 8
    swap: bool = True


@dataclasses.dataclass(frozen=True)
class FewTiles:
    """Of the dot products of four bytes: weight rows, words of a row a step, and steps that are read ahead."""

    rows: int
    words: int
    warps: int
    stages: int
    splits: int | None = None


def few_tiles_of(M: int, N: int, programs: int) -> FewTiles:
    """Tiles for M tokens (a power of 2) that share N rows, on so many multiprocessors.

    Microseconds of one token, H200, as (rows, words, warps): 22016 x 4096 takes 9.8 in (32, 64, 4), 10.2 in (16, 64, 2)
    and 10.8 in (16, 128, 4); 4096 x 11008 takes 6.8 in (8, 128, 2) and 6.9 in (16, 128, 4), 4096 x 4096 takes 4.5 and
    4.6: few rows where there are few, and steps of half as many words where there are enough to do.
    """
    if M > 1:
        return FewTiles(16 // M, 128, 4, 3)
    for rows, warps in ((32, 4), (16, 2)):
        if triton.cdiv(N, rows) >= 4 * programs:
            return FewTiles(rows, 64, warps, 3)
    return FewTiles(8, 128, 2, 3)


def token_tiles_of(N: int, width: int, programs: int) -> FewTiles:
    """The same for one token where products are started before the kernel in front of them has ended: programs are of
    one warp, so that many of the next product find room beside those of this one. Longer rows are read further ahead;
    where there are the most rows, a program has more; and steps are short where they would go far beyond a row's end.

    Microseconds of one token, H200, as (rows, words, stages), a warp each: 17280 x 3200 takes 6.7 in (16, 32, 3) and
    8.5 in (8, 64, 3), 22016 x 4096 8.3 and 9.4; 4096 x 11008 takes 5.6 in (8, 64, 5) and 6.4 in (8, 64, 3), 12288 x
    4096, whose rows are shorter, takes 6.7 and 5.7; 9600 x 3200, rows of 200 words, takes 4.8 in (8, 32, 4) and 5.0 in
    (8, 64, 3)."""
    if triton.cdiv(N, 32) >= 4 * programs:
        return FewTiles(16, 32, 1, 3)
    words = width // 4
    if 64 * triton.cdiv(words, 64) > words + words // 8:
        return FewTiles(8, 32, 1, 4)
    return FewTiles(8, 64, 1, 3 if width <= 1024 else 5)


def processors(device: torch.device) -> int:
    """Multiprocessors; in the interpreter, where one program runs after the other, few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tiles_of(M: int, N: int, width: int, programs: int) -> Tiles:
    """Tiles for M tokens and N rows of `width` bytes on so many multiprocessors.

    Weights are the left operand: unpacked in registers, with few tokens as the matrix units' narrow side. The sum is
    split where tiles alone would leave multiprocessors without work, but no finer than four steps.

    Microseconds of 256 tokens, H200, as (rows, tokens, step, warps): 22016 x 4096 takes 52.9 in (256, 64, 64, 8), 61.8
    in (128, 64, 64, 8), 76.3 in (256, 128, 64, 8) and 73.9 in (128, 128, 64, 8); 12288 x 4096 takes 32.9, -, 40.2 and
    50.3. 4096 x 11008, of which 256 rows a tile keep half of the multiprocessors, takes 56.0 in (256, 64, 64, 8), 47.4
    in (128, 64, 32, 8).
    """
    tokens = min(64, max(16, triton.next_power_of_2(M)))
    if tokens == 16:
        return _tiles_of_16(N, width, programs)
    lanes = triton.cdiv(M, tokens)
    if tokens == 64 and lanes * triton.cdiv(N, 256) >= programs:
        return Tiles(64, 256, 64, 8, 3)
    rows = 128 if 3 * lanes * triton.cdiv(N, 128) >= 2 * programs else 64
    tiles = lanes * triton.cdiv(N, rows)
    step = 32 if tokens == 64 and rows == 128 else 128
    splits = max(1, min(programs // tiles, width // step // 4))
    return Tiles(tokens, rows, step, 8 if rows == 128 else 4, 4, splits)


def _tiles_of_16(N: int, width: int, programs: int) -> Tiles:
    """Of up to 16 tokens: as many rows as leave work for every other multiprocessor.

    Microseconds at 16 tokens, H200, as (rows, step, splits): 9600 x 3200 takes 9.4 in (128, 128, 1), 10.0 in
    (64, 128, 1); 22016 x 4096 takes 14.6 and 18.5. 4096 x 4096 takes 9.2 in (128, 128, 1), 7.2 in (64, 256, 1) and 8.0
    in (64, 128, 4): 8 steps are not worth a split; 4096 x 11008 takes 14.9 in (64, 256, 1), 11.8 in (64, 128, 5).
    """
    if 2 * triton.cdiv(N, 128) >= programs:
        return Tiles(16, 128, 128, 8, 3)
    steps = width // 128
    splits = min(triton.cdiv(2 * programs, triton.cdiv(N, 64)), steps // 4) if steps >= 16 else 1
    return Tiles(16, 64, 128 if splits > 1 else 256, 4, 3, splits)


def run_linear(
    codes: Tensor, scale: Tensor, rowsum: Tensor, data: Tensor, alpha: Tensor, N: int, dtype: torch.dtype,
    tiles: Tiles | FewTiles | StreamTiles | None = None, splits: int | None = None, gated: bool = False,
    behind_norm: bool = False,
) -> Tensor:  # fmt: skip
    """y (M, N). codes int8 (M, padded K), data as packed, or int8 (padded N, padded K) for weights in a byte each.

    gated: y is (M, N / 2), up * relu(gate)^2, of weights whose first half of rows is the gate's, the second up's.
    `tiles` or `splits` force what follows from the shapes otherwise. behind_norm: see `ternary_linear`.
    """
    M, K = codes.shape
    dense = data.dtype == torch.int8
    width = K // 4
    y = torch.empty(M, N // 2 if gated else N, dtype=dtype, device=codes.device)
    programs = processors(codes.device)
    if M == 0:
        return y
    vectors = (scale, rowsum, alpha, y)
    if isinstance(tiles, FewTiles) or (M <= GEMV_TOKENS and tiles is None and not dense):
        ahead = behind_norm and M == 1 and data.nbytes <= MOST_AHEAD
        _run_gemv(codes, data, vectors, N, width, tiles, splits, gated=gated, ahead=ahead)
        return y
    if tiles is None and splits is None and hopper.applies(codes, data):
        tiles = hopper.stream_tiles_of(M, N, width, programs)
    if isinstance(tiles, StreamTiles):
        hopper.run_stream(codes, data, vectors, N, tiles, gated)
        return y
    if tiles is None:
        tiles = tiles_of(M, N, width, programs)
        if dense:  # a step of weights in a byte each is four times as long
            ahead = SHARED // (4 * tiles.step * (tiles.tokens + tiles.rows))
            tiles = dataclasses.replace(tiles, stages=min(tiles.stages, ahead))
    splits = splits or tiles.splits
    m_tiles, n_tiles = triton.cdiv(M, tiles.tokens), triton.cdiv(N, tiles.rows)
    work, arrived = _shared(M * N, m_tiles * n_tiles, splits, codes.device)
    with torch.cuda.device_of(codes):
        gemm.gemm_kernel[(m_tiles * n_tiles, splits)](
            codes, data.view(torch.int8), *vectors, work, arrived, M, N, width, splits, n_tiles, m_tiles,
            BM=tiles.tokens, BN=tiles.rows, BYTES=tiles.step, GROUP=tiles.group, SPLIT=splits > 1, SWAP=tiles.swap,
            DENSE=dense, GATED=gated, ASM=ASM, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return y


def run_rows(
    codes: Tensor, scale: Tensor, rowsum: Tensor, data: Tensor, alpha: Tensor, N: int, dtype: torch.dtype,
    places: Tensor, counts: Tensor, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """y (M, N) in the listed rows of each token, zeros elsewhere."""
    y = torch.zeros(codes.shape[0], N, dtype=dtype, device=codes.device)
    if codes.shape[0]:
        _run_gemv(codes, data, (scale, rowsum, alpha, y), N, codes.shape[1] // 4, None, splits, (places, counts))
    return y


def _run_gemv(
    codes: Tensor, data: Tensor, vectors: tuple[Tensor, ...], N: int, width: int, tiles: FewTiles | None,
    splits: int | None, listed: tuple[Tensor, Tensor] | None = None, gated: bool = False, ahead: bool = False,
) -> None:  # fmt: skip
    M = codes.shape[0]
    if codes.storage_offset() % 4:
        codes = codes.clone()  # they are read in words
    BM = 1 if listed else triton.next_power_of_2(M)
    if tiles is None and BM == 1 and is_hopper(codes.device):
        tiles = token_tiles_of(N, width, processors(codes.device))
    tiles = tiles or few_tiles_of(BM, N, processors(codes.device))
    blocks, tokens = triton.cdiv(N, tiles.rows), M if listed else 1
    steps = triton.cdiv(width // 4, tiles.words)
    splits = splits or tiles.splits or max(1, min(steps, 2 * processors(codes.device) // (blocks * tokens)))
    work, arrived = _shared(M * N, blocks * tokens, splits, codes.device)
    places, counts = listed or (None, None)
    with torch.cuda.device_of(codes):
        gemv.gemv_kernel[(blocks, splits, tokens)](
            codes.view(torch.int32), data.view(torch.int32), *vectors, work, arrived, places, counts, M, N, width // 32,
            splits, 0 if places is None else places.stride(0), BM=BM, BN=tiles.rows, WORDS=tiles.words,
            STAGES=tiles.stages, SPLIT=splits > 1, GATHER=listed is not None, GATED=gated, ASM=ASM,
            AHEAD=ahead, num_warps=tiles.warps, **launched(overlaps(codes.device)),
        )  # fmt: skip


def run_columns(
    codes: Tensor, scale: Tensor, rowsum: Tensor, data: Tensor, alpha: Tensor, N: int, dtype: torch.dtype,
    places: Tensor, counts: Tensor, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """y (M, N) from weights packed along N, `data` (padded K, padded N / 4); only the listed k of a token are read."""
    M, width = codes.shape[0], padded(N) // 4
    y = torch.empty(M, N, dtype=dtype, device=codes.device)
    if M == 0:
        return y
    step, rows = 128, 16
    blocks = triton.cdiv(width, step)
    splits = splits or max(1, min(triton.cdiv(places.shape[1], 8 * rows), 2 * processors(codes.device) // (blocks * M)))
    work, arrived = _shared(M * N, blocks * M, splits, codes.device)
    with torch.cuda.device_of(codes):
        gemv.columns_kernel[(blocks, splits, M)](
            codes, data, scale, rowsum, alpha, y, work, arrived, places, counts, N, width, splits, codes.stride(0),
            places.stride(0), BYTES=step, ROWS=rows, SPLIT=splits > 1, num_warps=4,
        )  # fmt: skip
    return y


def run_places(gate: Tensor) -> tuple[Tensor, Tensor]:
    """See `function.places_above_zero`; gate (M, N), elements of a row next to each other."""
    M, N = gate.shape
    places = torch.empty(M, N, dtype=torch.int32, device=gate.device)
    counts = torch.empty(M, dtype=torch.int32, device=gate.device)
    if M:
        block = triton.next_power_of_2(N)
        with torch.cuda.device_of(gate):
            gemv.places_kernel[(M,)](
                gate, places, counts, N, gate.stride(0), BLOCK=block, num_warps=min(32, max(4, block // 512))
            )
    return places, counts


def _shared(numbers: int, tiles: int, splits: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Zeros in which programs add up what they share, and count themselves; one buffer, for one launch that clears."""
    if splits == 1:
        return None, None
    both = torch.zeros(numbers + tiles, dtype=torch.int32, device=device)
    return both[:numbers], both[numbers:]
