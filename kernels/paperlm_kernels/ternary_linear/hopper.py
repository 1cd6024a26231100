"""Host side of the kernel for Hopper: where it applies, its tiles, its launch. Nothing here waits for the device."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading

import torch
import triton
from torch import Tensor

from paperlm_kernels.overlap import is_hopper

GRAIN = 1 << 16
"Sums that programs share are given to CUDA graphs in so many numbers, 256 KiB."
AT_ONCE = 32 * GRAIN
"So many are asked of the device at once, 8 MiB: enough for three graphs or more."


@dataclasses.dataclass(frozen=True)
class StreamTiles:
    """Tokens and weight rows of a tile, chunks of 128 columns a step, steps in flight and read; programs a tile; and
    how many tiles of tokens go together."""

    tokens: int
    rows: int
    chunks: int
    stages: int
    warps: int = 4
    splits: int = 1
    group: int = 16


def stream_tiles_of(M: int, N: int, width: int, programs: int) -> StreamTiles:
    """Tiles for M tokens and N rows of `width` bytes on so many multiprocessors.

    A step ends with a wait for its products, in which other programs of the multiprocessor have theirs: three of them
    with 128 rows and 64 tokens, in whose shared memory three steps find room; or, where that would leave
    multiprocessors without work, with half of the rows.

    Up to 64 tokens are one tile, and what takes time is the way of the weights. A program has 64 rows, the fewest that
    the matrix units take. Where that leaves half of the multiprocessors or more without one, programs share the sums.
    Of more than 16 tokens, whose sums are longer than the weights of a few steps, two, with 4,096 columns each; of 16,
    see `_shared`. Where it leaves fewer without one, two of 16 tokens share long rows, which was not measured. In a
    sweep on an H100 whose rows were not kept, 64 tokens times 4096 x 11008 took 13.1 us by two programs a tile and 15.9
    by four, times 4096 x 4096 8.1 by one and 8.7 by two, and 16 tokens times 6144 x 2048, of 96 tiles and 4 steps, 3.4
    by one and 4.3 by two.
    """
    chunks = width // 32
    if M > 64:
        few = triton.cdiv(M, 64) * triton.cdiv(N, 128) <= programs
        return StreamTiles(64, 64, 2, 4) if few else StreamTiles(64, 128, 2, 3)
    tokens, tiles = max(16, triton.next_power_of_2(M)), triton.cdiv(N, 64)
    if tokens == 16 and 2 * tiles <= programs:
        return _shared(chunks, tiles, programs)
    step = min(4, 128 // tokens)
    steps = triton.cdiv(chunks, step)
    whole = StreamTiles(tokens, 64, step, 4)
    if tiles > programs:
        return whole
    return _split(whole, min(2, chunks // 32 if tokens > 16 else steps // 8), steps)


def _split(tiles: StreamTiles, splits: int, steps: int) -> StreamTiles:
    """Shared by so many programs, or by fewer that have as many steps each."""
    return dataclasses.replace(tiles, splits=triton.cdiv(steps, triton.cdiv(steps, max(1, splits))))


def _shared(chunks: int, tiles: int, programs: int) -> StreamTiles:
    """Tiles of 16 tokens for few rows, of so many chunks.

    About 12 chunks a program. But the next product's programs read their weights early, so that it and this one should
    find room together: four programs of 4 chunks a step and three steps on a multiprocessor, whose registers hold no
    more, or six of 2 and four, if up to six share a tile. In a sweep on an H200 whose rows were not kept (with room for
    five of the latter), 16 tokens times 3200 x 8640 took 5.8 us by six programs of 2 chunks, 6.1 by five, 6.4 by five
    of 4 chunks, and 6.6 by four with four steps, which have no room beside themselves; times 4096 x 11008 7.7 by four
    of 4 chunks with three steps and 8.1 with four, times 4096 x 4096 4.5 by three.
    """
    wanted = min(8, triton.cdiv(chunks, 12))
    slow, quick = StreamTiles(16, 64, 4, 3), StreamTiles(16, 64, 2, 4)
    if wanted <= 6 and 4 * programs < 2 * tiles * wanted <= 6 * programs:
        return _split(quick, wanted, triton.cdiv(chunks, quick.chunks))
    return _split(slow, min(wanted, 4 * programs // (2 * tiles)), triton.cdiv(chunks, slow.chunks))


def most_splits(tiles: StreamTiles) -> int:
    """How many programs may share a tile: their sums are read at once, in 128 registers of a thread."""
    return min(8, 128 * 32 * tiles.warps // (tiles.rows * tiles.tokens))


def constants_of(tiles: StreamTiles, gated: bool = False, eight: bool = True) -> dict[str, int]:
    """What the kernel is compiled for. eight: there are a multiple of 8 rows of weights.

    HALF: a gate's row and its row of up have to be sums of one thread, and wgmma gives a thread rows that are 8 apart
    in each 64, and those 64 apart. Raises ValueError for more programs a tile than can share one.
    """
    if tiles.splits > most_splits(tiles):
        raise ValueError(f"{tiles.splits} programs share a tile of {tiles}; at most {most_splits(tiles)} can")
    return {
        "BM": tiles.tokens, "BN": tiles.rows, "C": tiles.chunks, "STAGES": tiles.stages, "GROUP": tiles.group,
        "PARTS": tiles.splits,
        "HALF": 0 if not gated else 8 if tiles.rows == 64 else 64, "EIGHT": eight,
    }  # fmt: skip


@functools.cache
def has_stream() -> bool:
    """Whether this Triton has what the kernel is written in."""
    try:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401

        import paperlm_kernels.ternary_linear.stream  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def applies(codes: Tensor, data: Tensor) -> bool:
    """Whether the kernel can take these tensors: the copy engine reads from multiples of 16 bytes."""
    if not is_hopper(codes.device) or data.dtype != torch.uint8 or not has_stream():
        return False
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (codes, data))


def run_stream(
    codes: Tensor, data: Tensor, vectors: tuple[Tensor, ...], N: int, tiles: StreamTiles, gated: bool = False
) -> None:  # fmt: skip
    """y, the last of `vectors` (scale, rowsum, alpha, y), of codes (M, padded K) and packed weights; see
    `launch.run_linear` for what gated is."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from paperlm_kernels.ternary_linear import stream

    M, K = codes.shape
    m_tiles, n_tiles = triton.cdiv(M, tiles.tokens), triton.cdiv(N, tiles.rows)
    constants, columns = constants_of(tiles, gated, N % 8 == 0), 32 * tiles.chunks
    box = [constants["HALF"] or tiles.rows, columns]
    parts = None
    with torch.cuda.device_of(codes):
        if tiles.splits > 1:
            parts = _parts(m_tiles * n_tiles * (tiles.splits - 1) * tiles.rows * tiles.tokens, codes.device)
        # chunks, tokens, 128 columns: one copy brings all chunks of a step
        x_desc = TensorDescriptor(
            codes,
            [K // 128, M, 128],
            [128, codes.stride(0), 1],
            [tiles.chunks, tiles.tokens, 128],
            stream.swizzled(128, rank=3),
        )
        w_desc = TensorDescriptor.from_tensor(data.view(torch.int8), box, stream.swizzled(columns))
        stream.stream_kernel[(m_tiles * n_tiles, tiles.splits)](
            x_desc, w_desc, *vectors, parts, M, N, triton.cdiv(K // 128, tiles.chunks), m_tiles,
            n_tiles, int(settled(data)), **constants, num_warps=tiles.warps, launch_pdl=True,
        )  # fmt: skip


def settled(data: Tensor) -> bool:
    """Whether an earlier product has read these very weights: then they were not written by the kernel just before.

    That product has to be of the same stream, whose order it tells, or of before the capture of a CUDA graph, which
    begins when all in front of it has ended. The version counter of a tensor tells when PyTorch writes it. Who writes
    packed weights in place in another way, as with a kernel of one's own or through `.data`, has to make a tensor of
    them for it to be seen: `data.view_as(data)`.
    """
    if data.is_inference():
        return False
    now, where = (data.data_ptr(), data._version), _place(data.device)
    before, there = getattr(data, "_read_by_ternary_linear", (None, where))
    data._read_by_ternary_linear = now, where
    return before == now and (there == where or 0 < where[1] != there[1])


def _place(device: torch.device) -> tuple[int, int, int]:
    """Device, capture of a CUDA graph or 0, and stream that a launch now goes to; -1 for a capture without a number."""
    if device.type != "cuda":
        return -1, 0, 0
    if torch.cuda.is_current_stream_capturing():
        return capture_of(device) or (device.index or 0, -1, 0)
    return device.index or 0, 0, torch.cuda.current_stream(device).cuda_stream


_LOCK = threading.Lock()
"For what follows, where several threads capture graphs."
_ROOMS: list[Tensor] = []
"All memory that sums in CUDA graphs were taken from, kept for ever: a graph can be replayed at any time."
_ROOM: dict[int, Tensor] = {}
"Device -> what is left of the last of it."
_CAPTURED: dict[tuple[int, int, int], Tensor] = {}
"(device, capture, stream) -> the shared sums of the products of a CUDA graph, which use them one after the other."


def _parts(numbers: int, device: torch.device) -> Tensor:
    """Zeros, int32, for what programs that share tiles hand to each other; the kernel leaves them as it found them.

    Made anew for each launch, so that no launch can spoil another's. In a CUDA graph, where each would be a kernel more
    in front of a product, there are some for each graph and stream (1 to 2 MiB), and each replay begins with making
    them zeros. They lie outside of the graph's memory, which has to be free when the capture ends.
    """
    capture = capture_of(device)
    if capture is None:
        _make_room(device)
        return torch.zeros(numbers, dtype=torch.int32, device=device)
    with _LOCK:
        found, room = _CAPTURED.get(capture), _ROOM.get(capture[0])
        if found is not None and found.numel() >= numbers:
            return found
        size = GRAIN * triton.cdiv(numbers, GRAIN)
        if room is None or room.numel() < size:
            return torch.zeros(numbers, dtype=torch.int32, device=device)
        while len(_CAPTURED) >= 64:
            del _CAPTURED[next(iter(_CAPTURED))]
        found, _ROOM[capture[0]] = room[:size], room[size:]
        _CAPTURED[capture] = found.zero_()
    return found


def _make_room(device: torch.device) -> None:
    """Memory for the shared sums of the next graphs; not while one is captured, and in a thread of its own, which has
    no part in a pool that allocations of this one may go to."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if (index in _ROOM and _ROOM[index].numel() >= AT_ONCE // 2) or torch.cuda.is_current_stream_capturing():
        return

    def allocate() -> None:
        _ROOMS.append(torch.empty(AT_ONCE, dtype=torch.int32, device=f"cuda:{index}"))

    with _LOCK:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        _ROOM[index] = _ROOMS[-1]


def capture_of(device: torch.device) -> tuple[int, int, int] | None:
    """Device, number of the capture of a CUDA graph that the current stream is in, and stream; None outside of one, and
    where the driver does not say which."""
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
    index = torch.cuda.current_device() if device.index is None else device.index
    return (index, number.value, stream) if asked == 0 and status.value == 1 else None
