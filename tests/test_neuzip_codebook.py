"""What the kernels count and make of it on the device is what NumPy makes: counts, palette, codes and tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from paperlm_kernels.neuzip import fix4, pack  # noqa: E402
from paperlm_kernels.neuzip.codebook import Codebook  # noqa: E402
from paperlm_kernels.neuzip.container import aligned  # noqa: E402
from paperlm_kernels.neuzip.kernel_codebook import store_decoding  # noqa: E402
from support_neuzip import bits_of, compiled_or_interpreted, gaussian, patterns  # noqa: E402

GAUSSIAN = np.bincount(bits_of(gaussian(2**20)) >> 7 & 0xFF, minlength=256)
COUNTS = {
    "gaussian": GAUSSIAN,
    "one exponent": np.eye(256, dtype=np.int64)[255] * 17,
    "all alike": np.full(256, 3),  # every comparison is a tie
    "ties within a palette": np.repeat([7, 0, 7, 1], 64),
    "halves": 2 ** np.clip(40 - np.arange(256), 0, None),  # as steep as counts get, and as large
    "zeros most": np.where(np.arange(256) == 0, 10**9, GAUSSIAN),
    "random": np.random.default_rng(0).integers(0, 2**30, 256),
    # palettes from an exponent to one so far above: the farthest that has a table of 32 exponents, and one farther
    **{f"over {span}": np.isin(np.arange(256), [*range(100, 114), 100 + span]) * 9 + 1 for span in (30, 31)},
}


@triton.jit
def table_kernel(decoding, left, limit, CODES: tl.constexpr):
    """What the kernel that writes streams does beside."""
    store_decoding(decoding, left, tl.program_id(0), limit, CODES)


@compiled_or_interpreted
@pytest.mark.parametrize("limit", [11, 12])
@pytest.mark.parametrize("name", COUNTS)
def test_the_codebook_that_the_device_makes_is_the_definitions(spot, name, limit):
    from paperlm_kernels.neuzip.launch_encode import _CODEBOOK, EXPONENTS, LEFT, TOLD_OF_CODES, tables_layout

    counts = COUNTS[name].astype(np.int64)
    right = Codebook.of_counts(counts, limit)
    given = counts.copy()
    given[0] = 0  # what the counting leaves out
    made = tables_layout(limit).room(spot.device, zeros=True).tensors
    made |= {"index": made["index"].view(torch.uint8), "stored": made["stored"].view(torch.uint8)}
    buffers = {
        **made,
        "counts": torch.from_numpy(given).to(spot.device),
        "left": torch.zeros(LEFT, dtype=torch.int32, device=spot.device),
        "pairs": torch.zeros(EXPONENTS**2, dtype=torch.int32, device=spot.device),
    }
    launched(_CODEBOOK, 1, buffers, int(counts.sum()), limit, 8)
    assert int(made["note"][3]) == min(counts[~np.isin(np.arange(256), right.palette)].sum(), 2**31 - 1)
    table_kernel[(2**limit // TOLD_OF_CODES,)](made["decoding"], buffers["left"], limit, CODES=TOLD_OF_CODES)
    assert sum(aligned(made[which].nbytes) for which in ("decoding", "packing", "index")) == right.table_bytes
    for which in ("decoding", "packing", "index", "stored"):
        wanted = getattr(right, which)
        assert np.array_equal(made[which].cpu().numpy().view(wanted.dtype)[: len(wanted)], wanted), which
    pairs = buffers["pairs"].cpu().numpy().view(np.uint32)
    assert np.array_equal(looked_up(pairs, right), right.packing[pairs_of(right)])


def launched(launcher, programs, buffers, *numbers):
    """One kernel on these buffers, by the names that they have there."""
    from paperlm_kernels.neuzip.launch_encode import PALETTE, TOLD
    from paperlm_kernels.neuzip.launcher import Starts

    starts = Starts({"PALETTE": PALETTE, "PART": TOLD})
    starts.run(launcher, programs, {name: t.data_ptr() for name, t in buffers.items()}, buffers.get, *numbers)


def pairs_of(book):
    """Of every two exponents, the place among pairs of indices."""
    return (16 * book.index.astype(np.int64)[:, None] + book.index[None, :]).reshape(-1)


def looked_up(pairs, book):
    """What the kernels find for every two exponents: of 32 neighbours, the last stands for all that have no index."""
    lowest, highest = int(book.palette.min()), int(book.palette.max())
    width, lowest = (32, lowest) if highest - lowest < 31 else (256, 0)
    place = np.arange(256) - lowest
    place = np.where((place >= 0) & (place < width), place, width - 1)
    return pairs[(place[:, None] * width + place[None, :]).reshape(-1)]


@compiled_or_interpreted
@pytest.mark.parametrize("name", COUNTS)
def test_the_lowest_of_fifteen_exponents_is_the_definitions(spot, name):
    from paperlm_kernels.neuzip.launch_encode import _LOWEST, TOTALS

    counts = COUNTS[name].astype(np.int64)
    buffers = {
        "counts": torch.from_numpy(np.where(np.arange(256) == 0, 0, counts)).to(spot.device),
        "lowest": torch.zeros(64, dtype=torch.uint8, device=spot.device),
        "index": torch.zeros(256, dtype=torch.uint8, device=spot.device),
        "note": torch.zeros(TOTALS, dtype=torch.int32, device=spot.device),
    }
    launched(_LOWEST, 1, buffers, int(counts.sum()))
    right = fix4.lowest_exponent(counts)
    assert int(buffers["lowest"][0]) == right
    assert int(buffers["note"][3]) == min(counts[~fix4.window(right)].sum(), 2**31 - 1)
    assert buffers["index"].tolist() == [0 if right <= e < right + fix4.WIDE else 15 for e in range(256)]


@compiled_or_interpreted
@pytest.mark.parametrize("kind", ["far apart", "a bad guess", "mostly zeros", "two scales"])
def test_exponents_far_from_most_are_counted_too(spot, kind):
    """A codebook of wrong counts would still lose nothing: the bytes tell."""
    t = gaussian(3 * 8192 + 40)
    if kind == "far apart":
        t = patterns((np.arange(len(t)) % 256 << 7).astype(np.uint16))
    elif kind == "a bad guess":  # what the first weights look like, no others do
        t[:1024] = 2.0**60
    elif kind == "mostly zeros":
        t[torch.rand(len(t)) < 0.9] = 0.0
    else:
        t[::2] *= 2.0**30
    for profile in ("fast", "fix4"):
        right = pack(t, profile=profile, raw="never", backend="reference")
        got = pack(t.to(spot.device), profile=profile, raw="never", backend=spot.backend)
        assert got.to_bytes() == right.to_bytes()
