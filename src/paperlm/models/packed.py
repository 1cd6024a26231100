"""Models whose ternary weights lie in two bits each, for use after training. Their numbers are the latent model's: in
float32 to the last bit; in 16 bits they are rounded once less (paperlm.models.quantized).

The layout is that of paperlm_kernels.ternary_linear, whose kernels compute the products on a GPU; elsewhere its
reference does. Scales stay in float32 whatever dtype the model has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from paperlm_kernels.ternary_linear import PackedTernary, pack_ternary, ternary_linear
from paperlm_kernels.ternary_linear.packing import CHUNK, LAYOUT, ROWS, VERSION, padded
from torch import Tensor, nn

from paperlm.errors import SpecError
from paperlm.models.quantized import QuantizedLinear, compute_dtype

PACKED = {"layout": LAYOUT, "layout_version": VERSION}
"`packed_weights` of a configuration: what of the layout a folder says."


class PackedLinear(nn.Module):
    """A projection of whole numbers: `weight` uint8 (rows, bytes), as PackedTernary.data; `weight_scale`, float32."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        empty = torch.empty(padded(out_features, ROWS), padded(in_features, CHUNK) // 4, dtype=torch.uint8)
        self.register_buffer("weight", empty)
        self.register_buffer("weight_scale", torch.empty((), dtype=torch.float32))
        self.checked = False

    def forward(self, x: Tensor, codes: Tensor, step: Tensor) -> Tensor:
        """x (..., in) is what codes and step, as QuantizedInput gives them, stand for -> (..., out) in its dtype.

        Raises SpecError at the first call behind loading for bytes that are no packed weights of this shape; not within
        torch.compile, which cannot look at them.
        """
        packed = self.look()
        dtype = compute_dtype(x)
        return ternary_linear(codes.char(), step[..., 0].float(), None, packed, self.weight_scale, out_dtype=dtype)

    def look(self) -> PackedTernary:
        """The weights, looked through the first time. Raises SpecError."""
        metadata = PACKED | {"out_features": self.out_features, "in_features": self.in_features}
        if self.checked or torch.compiler.is_compiling():
            return PackedTernary(self.weight, self.out_features, self.in_features)
        try:
            packed = PackedTernary.load(self.weight, metadata)
        except (ValueError, TypeError) as error:
            raise SpecError(f"packed weights: {error}") from None
        if not (self.weight_scale.isfinite() and self.weight_scale > 0):
            raise SpecError(
                f"packed weights with the scale {float(self.weight_scale)}: it is mean|W|, above 0; pack anew"
            )
        self.checked = True
        return packed

    def _load_from_state_dict(self, *args: Any) -> None:
        self.checked = False
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {LAYOUT}"


def check_layout(described: Any, quantization: Any) -> None:
    """Raise SpecError for `packed_weights` that cannot be read, or that stand for other weights than ternary ones."""
    if described != PACKED:
        raise SpecError(
            f"packed_weights: {described!r} is not the layout that is read here, {PACKED!r}: pack latent weights anew"
        )
    if quantization is None or quantization.weight is None or quantization.weight.name != "ternary_absmean":
        raise SpecError("packed_weights: only weights of the quantizer ternary_absmean are packed; see `quantization`")
    for place in ("qkv", "o", "gate_up", "down"):
        if getattr(quantization, place) is None:
            raise SpecError(
                f"packed_weights: nothing quantizes the input `{place}`, and the product of packed weights is one of "
                "whole numbers: keep the latent weights of such a model"
            )


def pack(model: Any) -> Any:
    """The model with packed weights, in evaluation mode; what is no projection is copied.

    `model.save_pretrained` of it writes a folder that loads as any other, in about an eighth of the room in bfloat16.
    Raises SpecError for a model without quantizers of weights and inputs, one that is packed already, weights that are
    not finite, and a shard of a weight.
    """
    config = copy.deepcopy(model.config)
    if config.packed_weights is not None:
        raise SpecError("packed_weights: the model is packed already")
    config.packed_weights = dict(PACKED)
    check_layout(config.packed_weights, config.quantizers())
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            codes, scale = module.quantizer.quantize(module.whole_weight().detach())
            state[f"{name}.weight"] = pack_ternary(codes).data
            state[f"{name}.weight_scale"] = scale
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    made = type(model).from_pretrained(None, config=config, state_dict=state, dtype=model.dtype).to(model.device).eval()
    for module in made.modules():
        if isinstance(module, PackedLinear):
            module.look()
    return made
