"""Ternary weights in two bits each: the layout "planar-128", and what of it is checked when it is read.

A matrix t (N, K) of -1, 0, 1 is kept as codes c = t + 1; K and N are padded to multiples of 128 with the weight 0.
`data` is uint8 (padded N, padded K / 4), row-major: byte j of the m-th 32 bytes of a row holds, in its bits 2s and
2s + 1 for s = 0 .. 3, the code of k = 128 m + 32 s + j. So

- a tile of bytes, shifted right by 2s and masked with 3, is the operand for 32 consecutive activations, and
- four neighbouring bytes read as one word, shifted by 2s and masked with 0x03030303, are the codes of four
  consecutive k,

and one copy serves matrix units and dot products of four bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LAYOUT = "planar-128"
VERSION = 1
CHUNK = 128
ROWS = 128
EPS = 1e-5
"What mean|W| is not let below."
_ZERO = 0x55  # four codes of 1
_FIELDS = ("layout", "layout_version", "out_features", "in_features")


def padded(size: int, multiple: int = CHUNK) -> int:
    """The next multiple.

    >>> padded(5460), padded(4096)
    (5504, 4096)
    """
    return -(-size // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class PackedTernary:
    """A packed matrix: `data` uint8 (padded out_features, padded in_features / 4), without its scales.

    Raises TypeError for other data than uint8, ValueError for a shape or layout that does not belong together and for
    data that is not contiguous, whose rows the kernels would not find.
    """

    data: Tensor
    out_features: int
    in_features: int
    layout: str = LAYOUT
    version: int = VERSION

    def __post_init__(self) -> None:
        if (self.layout, self.version) != (LAYOUT, VERSION):
            raise ValueError(
                f"packed weights of layout {self.layout!r}, version {self.version}; these kernels read {LAYOUT!r}, "
                f"version {VERSION}: unpack them with the version that wrote them, then pack_ternary(codes)"
            )
        if self.out_features < 1 or self.in_features < 1:
            raise ValueError(f"a packed matrix of {self.out_features} x {self.in_features}; give sizes of 1 or more")
        if self.data.dtype != torch.uint8:
            raise TypeError(f"packed weights are uint8, not {self.data.dtype}; pack_ternary makes them of codes")
        right = (padded(self.out_features, ROWS), padded(self.in_features) // 4)
        if tuple(self.data.shape) != right:
            raise ValueError(
                f"packed weights of shape {tuple(self.data.shape)} for a matrix of {self.out_features} x "
                f"{self.in_features}, which {LAYOUT} keeps as {right}; give the sizes that they were packed with"
            )
        if not self.data.is_contiguous():
            raise ValueError("packed weights that do not lie row behind row: give data.contiguous()")

    @property
    def metadata(self) -> dict[str, str]:
        """What has to be kept beside `data`, as text (for safetensors)."""
        sizes = {"out_features": str(self.out_features), "in_features": str(self.in_features)}
        return {"layout": self.layout, "layout_version": str(self.version), **sizes}

    @classmethod
    def load(cls, data: Tensor, metadata: Mapping[str, object]) -> PackedTernary:
        """`data` with the `metadata` it was kept with, looked through: every code is 0, 1 or 2, the padding 1.

        Raises ValueError for metadata that lack a field, another layout, another shape, or bytes of something else.
        A shape that fills up to as many bytes cannot be told from the right one where what lies between the two is 0.
        """
        if missing := [field for field in _FIELDS if field not in metadata]:
            raise ValueError(f"packed weights without {', '.join(missing)} in their metadata; they have all of "
                             f"{', '.join(_FIELDS)}, as PackedTernary.metadata gives them")  # fmt: skip
        try:
            version, rows, columns = (int(metadata[field]) for field in _FIELDS[1:])
        except (TypeError, ValueError):
            found = ", ".join(f"{field} {metadata[field]!r}" for field in _FIELDS[1:])
            raise ValueError(f"packed weights with {found} in their metadata: these are whole numbers, as "
                             "PackedTernary.metadata gives them") from None  # fmt: skip
        packed = cls(data.contiguous(), rows, columns, str(metadata["layout"]), version)
        if bool((packed.data & (packed.data >> 1) & _ZERO).any()):
            raise ValueError(f"packed weights hold the code 3, which {LAYOUT} does not have: they are damaged, or of "
                             "another layout; pack them anew with pack_ternary")  # fmt: skip
        codes = _codes(packed.data)
        if bool((codes[packed.out_features :] != 1).any() or (codes[:, packed.in_features :] != 1).any()):
            raise ValueError(
                f"the padding beyond {packed.out_features} x {packed.in_features} is not zero: the weights are of "
                "another shape or layout; pack them anew with pack_ternary"
            )
        return packed

    def to(self, device: torch.device | str) -> PackedTernary:
        """On another device."""
        return dataclasses.replace(self, data=self.data.to(device))


def pack_ternary(codes: Tensor) -> PackedTernary:
    """Packs codes (N, K) of -1, 0 and 1, of any dtype. Raises ValueError for other values or another number of axes."""
    if codes.ndim != 2 or not codes.numel():
        raise ValueError(f"codes of shape {tuple(codes.shape)}; give the matrix (out_features, in_features)")
    N, K = codes.shape
    if not bool(((codes == 0) | (codes.abs() == 1)).all()):
        raise ValueError(
            "codes other than -1, 0 and 1: quantize a latent weight first, with quantize_weight, or pack it with "
            "pack_weights"
        )
    full = torch.ones(padded(N, ROWS), padded(K), dtype=torch.uint8, device=codes.device)
    full[:N, :K] = (codes + 1).to(torch.uint8)
    planes = full.view(len(full), -1, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    data = (planes << shifts[:, None]).sum(2, dtype=torch.uint8).view(len(full), -1)
    return PackedTernary(data, N, K)


def unpack_ternary(packed: PackedTernary, rows: slice = slice(None)) -> Tensor:
    """The codes -1, 0, 1 as int8 (N, K), or some rows of them."""
    within = range(packed.out_features)[rows]
    data = packed.data[within.start : within.stop : within.step]
    return _codes(data)[:, : packed.in_features].to(torch.int8) - 1


def _codes(data: Tensor) -> Tensor:
    """0, 1, 2 as uint8 (rows, padded K)."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)  # made there: graphs copy nothing in
    planes = (data.view(len(data), -1, 1, 32) >> shifts[:, None]) & 3
    return planes.view(len(data), -1)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 and alpha (float32, no axes) of one latent weight (N, K): alpha = mean|W|, t = clip(round(W / alpha)).

    In float32, alpha not below 1e-5 (BitNet a4.8, arXiv 2411.04965, section 3.1). Rounds half to even. The mean is of
    the whole matrix: raises ValueError for a shard of one.
    """
    if hasattr(weight, "full_tensor"):
        raise ValueError(
            "a shard of a weight: its mean|W| is not the matrix's, which would change every code; gather it first, "
            "with weight.full_tensor()"
        )
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"a weight of shape {tuple(weight.shape)} and {weight.dtype}; give a float matrix (N, K)")
    latent = weight.detach().float()
    alpha = latent.abs().mean().clamp(min=EPS)
    return (latent * alpha.reciprocal()).round().clamp(-1, 1).to(torch.int8), alpha


def fused_alpha(alphas: Sequence[Tensor | float], rows: Sequence[int]) -> Tensor:
    """One alpha a row, float32 (sum of rows), of matrices that were laid one below the other, each with its own."""
    if len(alphas) != len(rows):
        raise ValueError(f"{len(alphas)} scales for {len(rows)} matrices; each has its own")
    if many := [tuple(a.shape) for a in alphas if isinstance(a, Tensor) and a.numel() != 1]:
        raise ValueError(f"a scale of shape {many[0]}; a matrix has one number, mean|W|")
    return torch.cat([torch.as_tensor(a).float().reshape(1).expand(n) for a, n in zip(alphas, rows, strict=True)])


def pack_weights(weights: Sequence[Tensor]) -> tuple[PackedTernary, Tensor]:
    """Latent weights (N_i, K) as one packed matrix, one below the other, and its alpha (sum of N_i): Q, K and V share
    their input, so do gate and up. Raises ValueError for weights of different width, without values (meta), and with
    values that are not finite."""
    for weight in weights:
        if weight.is_meta:
            raise ValueError("a weight on the device meta, which holds no values: load it first")
    if len({weight.shape[-1] for weight in weights}) != 1:
        shapes = ", ".join(str(tuple(weight.shape)) for weight in weights) or "none"
        raise ValueError(f"weights of shapes {shapes}; those of one product have one input and so the same width")
    codes, alphas = zip(*(quantize_weight(weight) for weight in weights), strict=True)
    if not bool(torch.stack([alpha.isfinite() for alpha in alphas]).all()):
        raise ValueError(
            "a weight has a value that is not finite, or mean|W| is above float32's largest number: every code of the "
            "matrix would be of it; mend the checkpoint, or bring the weights to range"
        )
    return pack_ternary(torch.cat(codes)), fused_alpha(alphas, [len(c) for c in codes])
