"""Host side of the kernel for Hopper: where it applies, its tiles, its launch."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os

import torch
import triton
from torch import Tensor

MOST_SUMS = 2**22
"Numbers that programs which share tiles add up in memory, the most."

AT_ONCE = 2**17
"Numbers of the first sums of a CUDA graph, the fewest, that a later product seldom needs more."


@dataclasses.dataclass(frozen=True)
class StreamTiles:
    """Tokens and weight rows of a tile, chunks of 128 columns a step, steps in flight and read; programs a tile."""

    tokens: int
    rows: int
    chunks: int
    stages: int
    warps: int = 4
    splits: int = 1
    ahead: bool = False
    parts: bool = True


def stream_tiles_of(M: int, N: int, width: int, programs: int) -> StreamTiles:
    """Tiles for M tokens and N rows of `width` bytes on so many multiprocessors.

    Up to 64 tokens are one tile, and what takes time is the way of the weights: 64 rows a program, the fewest that the
    matrix units take, two programs a multiprocessor, which share a sum where there are too few rows for that. More
    tokens go in tiles of 64, with 128 rows.
    """
    chunks = width // 32
    if M > 64:
        if triton.cdiv(M, 64) * triton.cdiv(N, 128) > programs:
            return StreamTiles(64, 128, 2, 3)
        return StreamTiles(64, 64, 2, 4)
    tokens = max(16, triton.next_power_of_2(M))
    step = min(4, 128 // tokens)
    tiles, steps = triton.cdiv(N, 64), triton.cdiv(chunks, step)
    if tiles > programs:
        return StreamTiles(tokens, 64, step, 6 if tokens == 16 and tiles <= 2 * programs else 4)
    splits = max(1, min(3 * programs // tiles, triton.cdiv(steps, 3)))
    share = triton.cdiv(steps, splits)
    return StreamTiles(tokens, 64, step, 4, 4, triton.cdiv(steps, share))


def constants_of(tiles: StreamTiles, gated: bool = False) -> dict[str, int | bool]:
    """What the kernel is compiled for.

    HALF: of pairs of rows, a gate's and one of up, both have to be a thread's, and wgmma gives a thread rows that are 8
    apart in each 64, and those 64 apart; so many rows of each take turns.
    """
    return {
        "BM": tiles.tokens, "BN": tiles.rows, "C": tiles.chunks, "STAGES": tiles.stages, "SPLIT": tiles.splits > 1,
        "AHEAD": tiles.ahead, "PARTS": triton.next_power_of_2(tiles.splits) if tiles.parts and tiles.splits > 1 else 0,
        "HALF": 0 if not gated else 8 if tiles.rows == 64 else 64,
    }  # fmt: skip


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels may be compiled for the matrix units and the copy engine of Hopper there."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def has_stream() -> bool:
    """Whether this Triton has what the kernel is written in."""
    try:
        import paperlm_kernels.ternary_linear.stream  # noqa: F401
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def applies(codes: Tensor, data: Tensor, y: Tensor) -> bool:
    """Whether the kernel can take these tensors: the copy engine reads from multiples of 16 bytes."""
    if not is_hopper(codes.device) or data.dtype != torch.uint8 or not has_stream():
        return False
    aligned = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (codes, data))
    return aligned and codes.shape[0] < 2**31 - 64 and y.dtype.itemsize in (2, 4)


def run_stream(
    codes: Tensor, data: Tensor, vectors: tuple[Tensor, ...], N: int, tiles: StreamTiles, gated: bool = False
) -> None:  # fmt: skip
    """y, the last of `vectors` (scale, rowsum, alpha, y), of codes (M, padded K) and packed weights; see
    `launch.run_linear` for what gated is."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from paperlm_kernels.ternary_linear import stream

    M, K = codes.shape
    m_tiles, n_tiles = triton.cdiv(M, tiles.tokens), triton.cdiv(N, tiles.rows)
    with torch.cuda.device_of(codes):
        early = settled(data)
        work, arrived = _sums(M * N, m_tiles * n_tiles, codes.device) if tiles.splits > 1 else (None, None)
        constants, columns = constants_of(tiles, gated), 32 * tiles.chunks
        if constants["PARTS"]:
            numbers = m_tiles * n_tiles * tiles.splits * tiles.rows * tiles.tokens
            work = torch.empty(numbers, dtype=torch.int32, device=codes.device)
        x_desc = TensorDescriptor.from_tensor(codes, [tiles.tokens, 128], stream.swizzled(128))
        box = [constants["HALF"] or tiles.rows, columns]
        w_desc = TensorDescriptor.from_tensor(data.view(torch.int8), box, stream.swizzled(columns))
        stream.stream_kernel[(m_tiles * n_tiles, tiles.splits)](
            x_desc, w_desc, data, *vectors, work, arrived, M, N, K // 4, triton.cdiv(K // 128, tiles.chunks),
            tiles.splits, m_tiles, int(early), **constants, num_warps=tiles.warps, launch_pdl=True,
        )  # fmt: skip


def settled(data: Tensor) -> bool:
    """Whether an earlier product has read these very weights: then they were not written by the kernel just before.

    The version counter of a tensor tells when PyTorch writes it. Who writes packed weights in another way has to make a
    tensor of them, e.g. `data.view_as(data)`.
    """
    if data.is_inference():
        return False
    before = getattr(data, "_read_by_ternary_linear", None)
    data._read_by_ternary_linear = data._version
    return before == data._version


_CAPTURED: dict[tuple[int, int, int], Tensor] = {}
"(device, capture, stream) -> zeros that the products of a CUDA graph share, which follow each other in it."


def _sums(numbers: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros in which programs add up what they share, and count themselves; the kernel leaves them as it found them.

    Made anew for each launch, so that no launch can spoil another's. In a CUDA graph, where that would be half of the
    time of a small product, they are made once a graph and stream: each replay begins with zeros.
    """
    whole = numbers + tiles
    capture = capture_of(device)
    if capture is None:
        both = torch.zeros(whole, dtype=torch.int32, device=device)
        return both[:numbers], both[numbers:]
    both = _CAPTURED.get(capture)
    if both is None or both.numel() < whole:
        for old in [key for key in _CAPTURED if key[1] != capture[1]][:-8]:
            del _CAPTURED[old]
        both = _CAPTURED[capture] = torch.zeros(max(whole, AT_ONCE), dtype=torch.int32, device=device)
    return both[:numbers], both[numbers:whole]


def capture_of(device: torch.device) -> tuple[int, int, int] | None:
    """Device, number of the capture of a CUDA graph that the current stream is in, and stream; None outside of one."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device).cuda_stream
    status, number = ctypes.c_int(), ctypes.c_uint64()
    try:
        asked = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
        )
    except (OSError, AttributeError):
        return None
    return (device.index or 0, number.value, stream) if asked == 0 and status.value == 1 else None
