"""Host side of decoding. It waits for nothing, and looks up once what does not change between two calls."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paperlm_kernels.neuzip import decode_errors, kernel_decode
from paperlm_kernels.neuzip.geometry import OCTET
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.launcher import Launcher, Start, addresses, on_device
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


class Decoding:
    """What a packed tensor's kernel is given at every call."""

    def __init__(self, packed: Packed) -> None:
        self.header: Header = packed.header
        self.sections = tuple(packed.sections.values())
        header, s, g, device = self.header, packed.sections, packed.header.geometry, packed.device
        plane = s[Section.PLANE]
        every = [
            octets_of(plane, header.mant_bits), plane, s.get(Section.NORM, plane), s[Section.PATCH],
            s[Section.PATCH_DIR],
        ]  # fmt: skip
        self.constants = {"OCTETS": g.octets, "LANES": g.lanes}
        self.numbers: tuple[int, ...] = (header.numel,)
        self.programs = header.blocks
        if header.codec == Codec.FIX4:
            self.launcher, every = _FIX4, [s[Section.PAYLOAD], *every]
            self.numbers += (packed.lowest,)
            self.constants["WIDTH"] = WIDTH
            self.programs = -(-header.numel // (2 * WIDTH * OCTET))
        else:
            streams = [s[Section.PAYLOAD], s[Section.BLOCK_DIR], s[Section.LANE_UNITS], packed.book.table(device)]
            self.launcher, every = _STREAMS, [*streams, *every, decode_errors.word(device)]
            self.constants |= {"LIMIT": g.limit, "UNIT": g.unit}
        self.constants |= {"K": header.mant_bits, "LOG_NORM": log_of(header.block_norm), "PDL": overlaps(device)}
        self.tensors = tuple(every)
        self.places = addresses(self.tensors)
        self._starts: dict[tuple[bool, bool], Start] = {}

    def fits(self, packed: Packed) -> bool:
        """Whether the tensor has the sections that it had."""
        now = packed.sections.values()
        return len(now) == len(self.sections) and all(map(operator.is_, self.sections, now))

    def __call__(self, target: Tensor, check: bool) -> None:
        """Decodes into a contiguous tensor."""
        place = target.data_ptr()
        known = check, place & 15 == 0
        found = self._starts.get(known)
        with on_device(target):
            if found is not None:
                start, behind = found
                start(*self.places, place, *behind)
                return
            constants = self.constants | {"ALIGNED": known[1]}
            if self.launcher is _STREAMS:
                constants["CHECK"] = check
            ready = self.launcher(
                self.programs, (*self.tensors, target.detach().view(torch.int16)), self.numbers, constants,
                (*self.places, place),
            )  # fmt: skip
        if ready is not None:
            start, own = ready
            self._starts[known] = start, (*self.numbers, *own)


def decoding_of(packed: Packed) -> Decoding:
    """Made where the tensor has none, or has other sections than it had."""
    if packed.decoding is None or not packed.decoding.fits(packed):
        packed.decoding = Decoding(packed)
    return packed.decoding


def run_decode(packed: Packed, target: Tensor, check: bool) -> None:
    """Decodes into a contiguous bfloat16 tensor. check: a stream that ends elsewhere sets the device's error word."""
    decoding_of(packed)(target, check)


def block_sums(t: Tensor, header: Header) -> Tensor:
    """`reference.block_sums` of a contiguous tensor on its device, int32."""
    size, bits = header.geometry.block, t.view(torch.int16).view(-1)
    factors = torch.arange(size // 2, dtype=torch.int32, device=t.device) * 2 + 1
    found = []
    for part in bits.split(max(1, SUMMED // size) * size):
        whole = torch.nn.functional.pad(part, (0, -len(part) % size)).view(torch.int32).view(-1, size // 2)
        found.append((whole * factors).sum(1, dtype=torch.int32))
    return torch.cat(found)
