"""Host side of decoding. It waits for nothing, and looks up once what does not change between two calls."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paperlm_kernels.neuzip import decode_errors, kernel_decode
from paperlm_kernels.neuzip.coding import Later
from paperlm_kernels.neuzip.geometry import OCTET
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.launcher import Launcher, Starts, addresses, aligned_alike, on_device
from paperlm_kernels.overlap import overlaps

if TYPE_CHECKING:
    from paperlm_kernels.neuzip.record import Packed

_STREAMS = Launcher(kernel_decode.decode_kernel)
WIDTH = 256
"Lanes that decode two octets each of codes of four bits; 2 WIDTH octets divide a block."
_FIX4 = Launcher(kernel_decode.decode_fix4_kernel, WIDTH // 32)
SUMMED = 2**24
"Weights whose words are multiplied at once, each by its factor, to verify them."
_OCTET = {7: torch.int64, 3: torch.int32, 1: torch.int16, 0: torch.uint8}
"Integers that hold sign and mantissa of eight weights."


def octets_of(plane: Tensor, k: int) -> Tensor:
    """A plane as one integer for each octet; its buffer goes on to where the last one ends."""
    size = k + 1
    count = -(-plane.numel() // size)
    whole = plane.as_strided((count * size,), (1,)) if plane.numel() % size else plane
    return whole.view(_OCTET[k])


def is_aligned(t: Tensor) -> bool:
    """Whether eight weights can be read and written at once: a view may begin at any element of its storage."""
    return t.data_ptr() % 16 == 0


def log_of(block: int | None) -> int:
    """Of a power of two; 0 for none."""
    return block.bit_length() - 1 if block else 0


@functools.lru_cache(1024)
def _starts(header: Header, device: torch.device, alike: bool | tuple[bool, ...], aligned: bool, check: bool) -> Starts:
    """Of all tensors with a header (without patches) whose buffers begin alike on 16 bytes, or do not."""
    g = header.geometry
    constants = {
        "OCTETS": g.octets, "LANES": g.lanes, "K": header.mant_bits, "LOG_NORM": log_of(header.block_norm),
        "PDL": overlaps(device), "ALIGNED": aligned,
    }  # fmt: skip
    if header.codec == Codec.FIX4:
        return Starts(constants | {"WIDTH": WIDTH}, device)
    return Starts(constants | {"LIMIT": g.limit, "UNIT": g.unit, "CHECK": check}, device)


class Decoding:
    """What a packed tensor's kernel is given at every call: where its buffers lie. Of one that was just packed on a
    device nobody makes tensors for it."""

    def __init__(self, packed: Packed) -> None:
        header, device, source = packed.header, packed.device, packed.source
        self._plain, self._device = header.with_patches(0), device
        self._source = source if isinstance(source, Later) else tuple(source.values())
        self._tensors: dict[str, Tensor] | None = None
        if header.codec == Codec.FIX4:
            self._launcher, self._numbers = _FIX4, (header.numel, packed.lowest)
            self._programs = -(-header.numel // (2 * WIDTH * OCTET))
        else:
            self._launcher, self._numbers = _STREAMS, (header.numel,)
            self._programs = header.blocks
        if isinstance(source, Later):
            self._at = source.places()
            self._at["plane8"] = self._at["plane"]
            if header.codec != Codec.FIX4:
                self._at["found"] = decode_errors.word(device).data_ptr()
            self._alike: bool | tuple[bool, ...] = True  # buffers of an allocation begin on 64 bytes
        else:
            tensors = self.tensors(packed)
            places = addresses(tensors.values())
            self._at, self._alike = dict(zip(tensors, places, strict=True)), aligned_alike(places)
        self._again: dict[tuple[bool, bool], Callable[[int], None]] = {}
        "Starts of the kernel that is compiled for targets that begin on 16 bytes, or do not, and checks, or does not."

    def tensors(self, packed: Packed) -> dict[str, Tensor]:
        """All that a kernel reads, by the names of its arguments, in order. packed: the tensor, which holds this."""
        if self._tensors is not None:
            return self._tensors
        s, plane, streams = packed.sections, packed.sections[Section.PLANE], packed.header.codec == Codec.PFX
        found = {"payload": s[Section.PAYLOAD]}
        if streams:
            found |= {
                "directory": s[Section.BLOCK_DIR], "units": s[Section.LANE_UNITS],
                "table": packed.book.table(packed.device),
            }  # fmt: skip
        found |= {
            "plane": octets_of(plane, packed.header.mant_bits), "plane8": plane, "norm": s.get(Section.NORM, plane),
            "patches": s[Section.PATCH], "patch_directory": s[Section.PATCH_DIR],
        }  # fmt: skip
        self._tensors = found | ({"found": decode_errors.word(packed.device)} if streams else {})
        return self._tensors

    def fits(self, packed: Packed) -> bool:
        """Whether the tensor has the sections that it had."""
        now, before = packed.source, self._source
        if isinstance(now, Later) or isinstance(before, Later):
            return now is before
        return len(now) == len(before) and all(map(operator.is_, before, now.values()))

    def __call__(self, packed: Packed, target: Tensor, check: bool) -> None:
        """Decodes the tensor that holds this into a contiguous one."""
        place = target.data_ptr()
        form = place & 15 == 0, check
        with on_device(target):
            again = self._again.get(form) or self._first(packed, target, form)
            if again is not None:
                again(place)

    def _first(self, packed: Packed, target: Tensor, form: tuple[bool, bool]) -> Callable[[int], None] | None:
        """What starts the kernel with another target. Where none is compiled, compiles and starts it: None."""
        starts = _starts(self._plain, self._device, self._alike, *form)
        again = starts.start(self._launcher, self._programs, self._at, "out", *self._numbers)
        if again is not None:
            self._again[form] = again
            return again

        def tensor(name: str) -> Tensor:
            return target.detach().view(torch.int16) if name == "out" else self.tensors(packed)[name]

        at = self._at | {"out": target.data_ptr()}
        starts.run(self._launcher, self._programs, at, tensor, *self._numbers)
        return None


def decoding_of(packed: Packed) -> Decoding:
    """Made where the tensor has none, or has other sections than it had."""
    if packed.decoding is None or not packed.decoding.fits(packed):
        packed.decoding = Decoding(packed)
    return packed.decoding


def run_decode(packed: Packed, target: Tensor, check: bool) -> None:
    """Decodes into a contiguous bfloat16 tensor. check: a stream that ends elsewhere sets the device's error word."""
    decoding_of(packed)(packed, target, check)


def block_sums(t: Tensor, header: Header) -> Tensor:
    """`reference.block_sums` of a contiguous tensor on its device, int32."""
    size, bits = header.geometry.block, t.view(torch.int16).view(-1)
    factors = torch.arange(size // 2, dtype=torch.int32, device=t.device) * 2 + 1
    found = []
    for part in bits.split(max(1, SUMMED // size) * size):
        whole = torch.nn.functional.pad(part, (0, -len(part) % size)).view(torch.int32).view(-1, size // 2)
        found.append((whole * factors).sum(1, dtype=torch.int32))
    return torch.cat(found)
