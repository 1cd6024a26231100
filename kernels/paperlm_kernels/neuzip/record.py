"""`pack` and what it gives, `Packed`: a tensor in fewer bits, on the device where it was."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.backends import chosen_backend
from paperlm_kernels.neuzip import decode_errors, fields, reference
from paperlm_kernels.neuzip.codebook import Codebook
from paperlm_kernels.neuzip.coding import Later, Taken, begin_coding, bits_of, owned
from paperlm_kernels.neuzip.container import WORDS, aligned, read_container, write_container
from paperlm_kernels.neuzip.errors import BlockSumError
from paperlm_kernels.neuzip.geometry import profile_of
from paperlm_kernels.neuzip.header import DTYPES, MOST, MOST_AXES, Codec, Header, Section
from paperlm_kernels.neuzip.sample import MOST_ESCAPES
from paperlm_kernels.neuzip.streams import TooLongError

if TYPE_CHECKING:
    from paperlm_kernels.neuzip.launch import Decoding

FEWEST_BLOCKS = 2
"Below, a tensor is kept as it is: its codebook and padding would eat what is saved."
REBUILD = 64
"Updates after which the codebook is made anew."


def pack(
    t: Tensor,
    *,
    mant_bits: int = 7,
    block_norm: int | None = None,
    profile: str = "default",
    norm_semantics: str = "true_max",
    rounding: str = "authors",
    nonfinite: str = "error",
    raw: str = "auto",
    out: Packed | None = None,
    backend: str = "auto",
) -> Packed:
    """Packs a tensor of any shape: exponents by a prefix code, sign and mantissa as they are (NeuZip, arXiv 2410.20650,
    section 3.2), or the mantissa in few bits (section 3.3).

    Args:
        t: bfloat16; float16 and float32 are kept as they are (RAW). Any strides.
        mant_bits: stored bits of the mantissa: 7, without loss, or 0, 1, 3.
        block_norm: with fewer than 7 bits, divide blocks of so many consecutive weights (32 to 1024, a power of two)
            by the mantissa of their largest; the paper's tables have 512. None does not.
        profile: "default" (10.7 bits for Gaussian weights), "dense" (10.6, decodes slower), "fast" (10.8), "fix4"
            (12.0; no entropy code).
        norm_semantics: "true_max", or "authors_v1" for what the published program computes (`fields.normalizers`).
        rounding: "authors", half away from zero; there is no other.
        nonfinite: what becomes of infinities where the mantissa is rounded: "error", or "keep". NaN is an error there.
        raw: "auto" keeps tensors of less than two blocks, and those that would not shrink, as they are (rounded all the
            same, where `mant_bits` says so); "never" codes them nevertheless.
        out: a Packed that takes over the result, in place of a new one.
        backend: "triton", "reference" or "auto", which is Triton on a GPU.

    Returns:
        a Packed on the device of `t`. The bytes are the same for every backend.

    Raises:
        TypeError, ValueError: a tensor or option that does not fit; the message names the fix.
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"a {type(t).__name__} to pack; give a tensor")
    if t.is_meta:
        raise TypeError("a tensor on the device meta, which holds no values: load it first")
    if out is not None and not isinstance(out, Packed):
        raise TypeError(f"out is a {type(out).__name__}; it is a Packed, whose place the result takes")
    header = _planned(t.dtype, t.shape, mant_bits, block_norm, profile, norm_semantics, rounding, nonfinite, raw)
    packed = _begun(t, header, None, raw, nonfinite, backend)()
    if out is None:
        return packed
    out._take(packed)
    return out


def from_bytes(data: bytes | bytearray | memoryview, check: str = "full") -> Packed:
    """A Packed, on the CPU, of `Packed.to_bytes()`.

    check: "full" compares every checksum; "header" the header's alone; "none" none, for data that were just written:
    damage then gives wrong weights or an error later, but no access outside of a buffer. Raises ContainerError.

    A container holds what is needed to decode it. `update_` of what is read packs with the options of the header:
    `raw` and `nonfinite` are the defaults again, and a tensor that was kept as it is (RAW) is coded by the profile
    "default", without rounding.
    """
    header, arrays = read_container(data, check)
    book = None
    if header.codec == Codec.PFX:
        book = Codebook.from_bytes(arrays[Section.CODEBOOK], header.geometry.limit)
    return Packed(header, owned(arrays, torch.device("cpu")), book)


class Packed:
    """A packed tensor. `pack` and `from_bytes` make it; header and sections are not to be changed."""

    def __init__(
        self, header: Header, sections: dict[Section, Tensor] | Later, book: Codebook | None, lowest: int | None = None
    ) -> None:
        self.header, self.source, self.book = header, sections, book
        "Sections, or what makes them."
        self._updates = 0
        # of FIX4, the exponent of code 1: on the host, for a launch must not wait for the device
        if lowest is None:
            lowest = int(self.sections[Section.CODEBOOK][0]) if header.codec == Codec.FIX4 else 0
        self.lowest = lowest
        self.decoding: Decoding | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"source": self.sections, "decoding": None}  # a copy's sections are elsewhere

    def __repr__(self) -> str:
        return (
            f"Packed({self.dtype}, {tuple(self.shape)}, {self.header.codec.name}, mant_bits={self.header.mant_bits}, "
            f"{self.bits_per_weight:.3f} bits per weight, {self.device})"
        )

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return torch.Size(self.header.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return getattr(torch, self.header.dtype)

    @property
    def sections(self) -> dict[Section, Tensor]:
        """Its parts, by name: uint8, or int32."""
        found = self.source  # once: another thread may be at it
        if isinstance(found, Later):
            with torch.inference_mode(False):  # whoever asks first, they are tensors like any other
                self.source = found = found.make()
        return found

    @property
    def device(self) -> torch.device:
        """Where it is."""
        found = self.source
        return found.device if isinstance(found, Later) else found[Section.PLANE].device

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on a GPU: sections, each a multiple of 64, and the codebook's tables. The same number on
        every device, from the start; on a GPU spare room may add a thousandth of the streams, a third of the patches
        and 300 bytes (`launch_encode.Guess`)."""
        own = sum(aligned(t.numel() * t.element_size()) for t in self.sections.values())
        return own + (self.book.table_bytes if self.book else 0)

    @property
    def bits_per_weight(self) -> float:
        """Of all sections, metadata included; tables that are built from them are not."""
        found = self.source
        stored = found.stored if isinstance(found, Later) else sum([t.nbytes for t in found.values()])
        return 8 * stored / max(1, self.header.numel)

    def unpack(self, out: Tensor | None = None, *, check: bool = True, backend: str = "auto") -> Tensor:
        """The tensor, contiguous, a new one or `out` (of the same shape, dtype and device; any strides).

        check: see that each stream ends where it should. On the CPU a StreamError is raised; on a GPU nothing waits:
        `raise_decode_errors(device)` reads what was found since it was last asked.
        """
        if out is None:
            target = torch.empty(self.header.shape, dtype=self.dtype, device=self.device)
        else:
            self._fits(out)
            target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._decode_into(target, check, backend)
        if out is None:
            return target
        if not out.is_contiguous():
            out.detach().copy_(target)
        return out

    def update_(self, t: Tensor, *, backend: str = "auto") -> Packed:
        """Packs `t` in place of what is here; it has the same shape, dtype and device, and keeps the options.

        A codebook is kept for up to 64 updates, unless more than a 1,000th of the weights escape it, which saves the
        histogram; nothing is lost by an old one. Codes of four bits have none, and count each time. What was here stays
        until the new is complete.
        """
        self.update_later(t, backend=backend)()
        return self

    def update_later(self, t: Tensor, *, backend: str = "auto") -> Callable[[], None]:
        """The beginning of `update_`, which does not wait for the device; what it returns, called once and on the same
        stream, does the rest.

        Until then what was here stays, and `t` is not to be changed. Raises ValueError at once for a tensor unlike this
        one; that it holds what a rounded mantissa cannot keep is found at the end, which raises then.
        """
        self._fits(t)
        template = self._template
        fresh = self.book is None or self._updates >= REBUILD
        begun = _begun(t, template, None if fresh else self.book, self._raw, self._nonfinite, backend, self._taken)

        def finish() -> None:
            made, anew = begun(), fresh
            if not anew and (made.header.codec == Codec.RAW or made.header.patches > MOST_ESCAPES * made.header.numel):
                anew, made = True, _begun(t, template, None, self._raw, self._nonfinite, backend)()
            updates = 0 if anew else self._updates + 1
            self._take(made)
            self._updates = updates

        return finish

    def verify(self, *, backend: str = "auto") -> None:
        """Compares streams' ends and blocks' sums; a tensor kept uncoded has neither. Raises ContainerError."""
        if self.header.codec == Codec.RAW:
            return
        if chosen_backend(backend, self.sections[Section.PLANE], torch.int32) == "triton":
            from paperlm_kernels.neuzip.launch import block_sums

            found = block_sums(self.unpack(backend=backend), self.header)
            decode_errors.raise_found(self.device)
            if not torch.equal(found, self.sections[Section.BLOCK_SUM]):
                raise BlockSumError("blocks have other sums than when they were packed: damaged; take another copy")
            return
        arrays = {section: _array(tensor, section) for section, tensor in self.sections.items()}
        out = np.empty(self.header.numel, np.uint16)
        reference.decode(self.header, arrays, self.book, out, sums=True)

    def to_bytes(self) -> bytes:
        """A container (`.nzb`), the same on every device."""
        return write_container(self.header, {s: _array(tensor, s) for s, tensor in self.sections.items()})

    def to(self, device: torch.device | str) -> Packed:
        """On another device; itself if it is there."""
        device = torch.empty(0, device=device).device  # with its number
        if self.device == device:
            return self
        arrays = {section: _array(tensor, section) for section, tensor in self.sections.items()}
        moved = Packed(self.header, owned(arrays, device), self.book)
        moved._updates, moved._template, moved._raw, moved._nonfinite = (
            self._updates, self._template, self._raw, self._nonfinite
        )  # fmt: skip
        return moved

    # What `update_` packs with. A tensor from a container has what its header says.
    _raw = "auto"
    _nonfinite = "error"
    __template: Header | None = None

    @property
    def _template(self) -> Header:
        if self.__template is not None:
            return self.__template
        if self.header.codec != Codec.RAW or self.header.dtype != "bfloat16":
            return dataclasses.replace(self.header, patches=0)
        return dataclasses.replace(self.header, codec=Codec.PFX, geometry=profile_of("default"))

    @_template.setter
    def _template(self, header: Header) -> None:
        self.__template = header

    @property
    def _taken(self) -> Taken | None:
        """Words of its streams and number of patches, if it is coded."""
        found = self.source
        if isinstance(found, Later):
            return found.taken
        header = self.header
        if header.codec == Codec.RAW:
            return None
        streams = header.codec == Codec.PFX
        words = found[Section.PAYLOAD].numel() - header.geometry.guard if streams else 0
        return words, header.patches

    def _take(self, other: Packed) -> None:
        self.header, self.source, self.book = other.header, other.source, other.book
        self.lowest, self.decoding = other.lowest, None
        self._updates, self._template, self._raw, self._nonfinite = 0, other._template, other._raw, other._nonfinite

    def _fits(self, t: Tensor) -> None:
        if t.shape != self.header.shape or t.dtype != self.dtype or t.device != self.device:
            raise ValueError(
                f"a tensor {tuple(t.shape)} of {t.dtype} on {t.device}, where {tuple(self.shape)} of {self.dtype} on "
                f"{self.device} is packed; give one like it, or use pack"
            )

    def _decode_into(self, target: Tensor, check: bool, backend: str) -> None:
        if self.header.numel == 0:
            return
        if self.header.codec == Codec.RAW:
            target.detach().copy_(self.sections[Section.PLANE].view(self.dtype).view(self.shape))
        elif chosen_backend(backend, target, torch.int32) == "triton":
            from paperlm_kernels.neuzip.launch import run_decode

            run_decode(self, target, check)
        else:
            arrays = {section: _array(tensor, section) for section, tensor in self.sections.items()}
            on_cpu = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
            reference.decode(self.header, arrays, self.book, bits_of(on_cpu))
            if on_cpu is not target:
                target.detach().copy_(on_cpu)


@functools.lru_cache(1024, typed=True)  # 7 and 7.0 are one key otherwise
def _planned(
    torch_dtype: torch.dtype, shape: torch.Size, k: int, norm: int | None, profile: str, semantics: str, rounding: str,
    nonfinite: str, raw: str,
) -> Header:  # fmt: skip
    geometry = profile_of(profile)
    known = {
        "mant_bits": (k, fields.MANT_BITS), "norm_semantics": (semantics, fields.SEMANTICS),
        "rounding": (rounding, ("authors",)), "nonfinite": (nonfinite, ("error", "keep")),
        "raw": (raw, ("auto", "never")),
    }  # fmt: skip
    for name, value in (("mant_bits", k), ("block_norm", norm)):
        if value is not None and type(value) is not int:
            raise TypeError(f"{name}={value!r} of type {type(value).__name__}; give an int")
    for name, (value, values) in known.items():
        if value not in values:
            raise ValueError(f"{name}={value!r}; it is one of {', '.join(map(str, values))}")
    if norm is not None and (k == 7 or norm not in fields.NORM_BLOCKS):
        raise ValueError(
            f"block_norm={norm} with mant_bits={k}; it is one of {', '.join(map(str, fields.NORM_BLOCKS))}, and for 0, "
            "1 or 3 bits: leave it out"
        )
    dtype = str(torch_dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(
            f"a tensor of {torch_dtype}; bfloat16 is packed, float16 and float32 are kept: convert it first"
        )
    if dtype != "bfloat16" and (k != 7 or raw == "never"):
        raise TypeError(
            f"a tensor of {torch_dtype} with mant_bits={k}, raw={raw!r}; only bfloat16 is coded: convert it"
        )
    if math.prod(max(1, axis) for axis in shape) > MOST or len(shape) > MOST_AXES:
        raise ValueError(f"a tensor of shape {tuple(shape)}; pack parts of up to 2^40 elements and {MOST_AXES} axes")
    header = Header(
        dtype=dtype, codec=Codec.FIX4 if profile == "fix4" else Codec.PFX, shape=tuple(shape), mant_bits=k,
        block_norm=norm, norm_semantics=semantics if norm else "true_max", geometry=geometry,
    )  # fmt: skip
    return header if dtype == "bfloat16" else dataclasses.replace(header, codec=Codec.RAW, geometry=None)


def _begun(
    t: Tensor, header: Header, book: Codebook | None, raw: str, nonfinite: str, backend: str,
    like: Taken | None = None,
) -> Callable[[], Packed]:  # fmt: skip
    """Begins to pack; what is returned waits for the device and ends it. `header` is without what the coding tells."""
    t = (t.detach() if t.requires_grad else t).contiguous()
    extremes = t.aminmax() if header.lossy and t.numel() else None
    may_be_raw = raw == "auto" or t.numel() == 0
    coded = header.codec != Codec.RAW and not (may_be_raw and header.blocks < FEWEST_BLOCKS)
    begun = begin_coding(t, header, book, chosen_backend(backend, t, torch.int32), like) if coded else None

    def finish() -> Packed:
        if extremes is not None:
            _refuse_nonfinite(extremes, nonfinite)
        made = None
        if begun is not None:
            try:
                made = Packed(*begun())
            except TooLongError as reason:
                if not may_be_raw:
                    raise ValueError("the codes of a lane exceed what a byte can say; use raw='auto'") from reason
        if made is None or (may_be_raw and made.bits_per_weight >= 8 * t.element_size()):
            made = _kept(t, header)
        made._template, made._raw, made._nonfinite = header, raw, nonfinite
        return made

    return finish


def _kept(t: Tensor, header: Header) -> Packed:
    """A tensor as it is; rounded, where `header` rounds: what is unpacked does not depend on whether it was coded."""
    if header.lossy and t.numel():
        values = reference.round_trip(bits_of(t.cpu()), header)
        t = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).to(t.device)
    kept = dataclasses.replace(header, codec=Codec.RAW, geometry=None, mant_bits=7, block_norm=None,
                               norm_semantics="true_max")  # fmt: skip
    return Packed(kept, {Section.PLANE: t.reshape(-1).clone().view(torch.uint8)}, None)


def _refuse_nonfinite(extremes: Sequence[Tensor], nonfinite: str) -> None:
    """ValueError for a tensor with this smallest and largest element. Both are NaN where there is one: a single pass
    over the weights, where `isfinite` and `any` take several."""
    strange = math.isnan if nonfinite == "keep" else lambda value: not math.isfinite(value)
    if any(map(strange, torch.stack(extremes).tolist())):
        what = "NaN" if nonfinite == "keep" else "NaN or infinity (nonfinite='keep' keeps infinities)"
        raise ValueError(
            f"the tensor holds {what}, which a rounded mantissa cannot keep: remove it, or pack with mant_bits=7"
        )


def _array(tensor: Tensor, section: Section) -> np.ndarray:
    array = tensor.cpu().numpy()
    return array.view(np.uint32) if section in WORDS and tensor.dtype == torch.int32 else array
