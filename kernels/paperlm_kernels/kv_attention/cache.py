"""`QuantizedKV`: keys and values in 3 or 4 bits, that new ones are appended to and a query attends over."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from paperlm_kernels.backends import chosen_backend
from paperlm_kernels.kv_attention import reference
from paperlm_kernels.kv_attention.layout import KVLayout, dequantize_heads, quantize_heads


@dataclasses.dataclass
class QuantizedKV:
    """The cache of one layer. Rows are behind the rotary embedding, one step a position and head.

    Raises ValueError for tensors of another shape than the layout has.
    """

    layout: KVLayout
    k_data: Tensor
    "uint8 (B, heads, capacity, row bytes); v_data alike"
    v_data: Tensor
    k_steps: Tensor
    "float16 or float32 (B, heads, capacity); v_steps alike"
    v_steps: Tensor
    lengths: Tensor
    "int32 (B,): how many positions are there, of each sequence the first ones"
    k_first: Tensor | None = None
    "uint8 (B, heads, D / 2): position 0 in 4 bits, where the others have 3; v_first alike"
    v_first: Tensor | None = None

    def __post_init__(self) -> None:
        B, heads, capacity = self.k_data.shape[:3]
        right = {
            **dict.fromkeys(("k_data", "v_data"), (B, heads, capacity, self.layout.row_bytes)),
            **dict.fromkeys(("k_steps", "v_steps"), (B, heads, capacity)),
            "lengths": (B,),
        }
        if self.layout.has_first:
            right |= dict.fromkeys(("k_first", "v_first"), (B, heads, self.layout.first.row_bytes))
        for name, shape in right.items():
            tensor = getattr(self, name)
            if tensor is None or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                what = "none" if tensor is None else f"one of shape {tuple(tensor.shape)}"
                raise ValueError(f"a cache of {self.layout} has {name} of shape {shape}, contiguous; given is {what}")

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        head_dim: int,
        capacity: int,
        *,
        bits: int = 4,
        mapping: str = "symmetric",
        first_bits: int = 4,
        step_dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
    ) -> QuantizedKV:
        """A cache with room for `capacity` positions and nothing in it. bits: 3 or 4; see `layout.KVLayout`. Raises
        ValueError for a size below 1, and for options that there are not."""
        layout = KVLayout(head_dim, bits, mapping, first_bits)
        for name, size in (("batch", batch), ("heads", heads), ("capacity", capacity)):
            if size < 1:
                raise ValueError(f"{name}={size}; a cache has room for 1 or more")
        if step_dtype not in (torch.float16, torch.float32):
            raise ValueError(f"steps of {step_dtype}; they are float16 or float32")

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        first = [None, None]
        if layout.has_first:
            first = [new(batch, heads, layout.first.row_bytes, dtype=torch.uint8) for _ in range(2)]
        data = [new(batch, heads, capacity, layout.row_bytes, dtype=torch.uint8) for _ in range(2)]
        steps = [new(batch, heads, capacity, dtype=step_dtype) for _ in range(2)]
        return cls(layout, *data, *steps, new(batch, dtype=torch.int32), *first)

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values with their steps, in this layer."""
        return 2 * self.k_data.shape[1] * (self.layout.row_bytes + self.k_steps.element_size())

    def append(
        self,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *,
        q: Tensor | None = None,
        advance: bool = True,
        backend: str = "auto",
    ) -> Tensor | None:
        """Adds T positions to every sequence.

        k, v: (B, T, heads, D), floating point; cos, sin: (B, T, D / 2) or (B, T, D), whose first half is taken, to turn
        the keys by (first half of a head against the second), or None if they are turned already. One launch on a GPU.

        q: queries (B, T, query heads, D) that are turned by the same angles in the same launch; they are returned, in
        their dtype. advance=False leaves `lengths` as they are, for a model whose layers share them.

        Raises ValueError, TypeError for tensors that do not fit; on a CPU also where there is no room, which a GPU does
        not look at: positions beyond the capacity are not stored there.
        """
        B, heads, capacity = self.k_data.shape[:3]
        D = self.layout.head_dim
        for name, x in (("k", k), ("v", v)):
            if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (B, heads, D) or x.shape != k.shape:
                raise ValueError(f"{name} of shape {tuple(x.shape)}; this cache takes ({B}, T, {heads}, {D})")
            if not x.is_floating_point() or x.device != self.k_data.device:
                raise TypeError(f"{name} of {x.dtype} on {x.device}; give floating point on {self.k_data.device}")
        T = k.shape[1]
        if q is not None and (q.shape[:2] != k.shape[:2] or q.shape[3:] != (D,) or q.shape[2] % heads or cos is None):
            raise ValueError(f"q of shape {tuple(q.shape)}; give ({B}, {T}, a multiple of {heads}, {D}), and cos and "
                             "sin to turn it by")  # fmt: skip
        if (cos is None) != (sin is None):
            raise ValueError("one of cos and sin alone; give both, or none if the keys are turned already")
        if cos is not None:
            for name, angle in (("cos", cos), ("sin", sin)):
                if angle.ndim != 3 or angle.shape[:2] != (B, T) or angle.shape[2] not in (D // 2, D):
                    raise ValueError(f"{name} of shape {tuple(angle.shape)}; give ({B}, {T}, {D // 2})")
            cos, sin = (angle[..., : D // 2].contiguous() for angle in (cos, sin))
        if not self.lengths.is_cuda and B and int(self.lengths.max()) + T > capacity:
            raise ValueError(
                f"{int(self.lengths.max())} + {T} positions in a cache for {capacity}; make a larger one with "
                "QuantizedKV.empty"
            )
        if chosen_backend(backend, k, torch.float32) == "triton":
            from paperlm_kernels.kv_attention.launch import run_append

            k, v, q = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (k, v, q))
            out = run_append(k, v, q, cos, sin, *self._tensors(), self.layout)
        else:
            out = None if q is None else reference.rotated(q, cos, sin).to(q.dtype)
            positions = self.lengths[:, None].long() + torch.arange(T, device=k.device)
            turned = k if cos is None else reference.rotated(k, cos, sin)
            for data, steps, first, x in (
                (self.k_data, self.k_steps, self.k_first, turned),
                (self.v_data, self.v_steps, self.v_first, v),
            ):
                reference.append_reference(data, steps, first, x, positions, self.layout)
        if advance:
            self.lengths += T
        return out

    def decode(self, q: Tensor, *, q_bits: int = 16, scale: float | None = None, backend: str = "auto") -> Tensor:
        """Attention of one query a sequence, q (B, query heads, D), turned already, over the positions that are there.

        Query heads are a multiple of the cache's: each of its heads serves as many that follow each other. q_bits: 16,
        or 4: the query is quantized with the cache's mapping first. scale: of the scores, 1 / sqrt(D) if None. Returns
        what is like q; zeros for a sequence without positions. Softmax and sums are in float32.

        Raises ValueError, TypeError for a query that does not fit.
        """
        B, heads = self.k_data.shape[:2]
        D = self.layout.head_dim
        if q.ndim != 3 or (q.shape[0], q.shape[2]) != (B, D) or q.shape[1] % heads or not q.shape[1]:
            raise ValueError(f"q of shape {tuple(q.shape)}; this cache takes ({B}, a multiple of {heads}, {D})")
        if not q.is_floating_point() or q.device != self.k_data.device:
            raise TypeError(f"q of {q.dtype} on {q.device}; give floating point on {self.k_data.device}")
        if type(q_bits) is not int or q_bits not in (4, 16):
            raise ValueError(f"q_bits={q_bits!r}; a query has 16 (as it is) or 4 bits")
        scale = D**-0.5 if scale is None else scale
        if chosen_backend(backend, q, q.dtype) == "triton":
            from paperlm_kernels.kv_attention.launch import run_decode

            return run_decode(q.contiguous(), *self._tensors(), self.layout, q_bits, scale)
        if q_bits == 4:
            mapping = self.layout.mapping
            turned = dequantize_heads(*quantize_heads(q, 4, mapping), 4, mapping)
        else:
            turned = q
        return reference.decode_reference(turned, *self.dequantized(), self.lengths, scale).to(q.dtype)

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """Keys and values in float32, (B, heads, longest length, D): what a prompt's queries attend to. Waits for the
        device."""
        length = int(self.lengths.max()) if len(self.lengths) else 0
        return tuple(
            reference.dequantized(data, steps, first, self.layout, length)
            for data, steps, first in (
                (self.k_data, self.k_steps, self.k_first), (self.v_data, self.v_steps, self.v_first)
            )
        )  # fmt: skip

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.k_data, self.v_data, self.k_steps, self.v_steps, self.k_first, self.v_first, self.lengths
