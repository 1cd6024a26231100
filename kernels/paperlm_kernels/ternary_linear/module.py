"""`TernaryLinear`: a layer in the place of an `nn.Linear` that was trained with ternary weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paperlm_kernels.rmsnorm_quantize import rmsnorm_quantize
from paperlm_kernels.rmsnorm_quantize.modes import MODES, kept, mode_of
from paperlm_kernels.ternary_linear.function import ternary_linear
from paperlm_kernels.ternary_linear.packing import LAYOUT, VERSION, PackedTernary, pack_weights


class TernaryLinear(nn.Module):
    """y = x_q W_q^T: the input quantized a token at a time, the weights in two bits. For use after training.

    Made of latent weights by `from_linear`. activation, multiple and keep are those of `rmsnorm_quantize`: the
    quantizer that the model was trained with. In a state dict: `weight` (packed), `alpha`, and `layout`, which loading
    checks: of which version it is, rows and columns, and the quantizer.
    """

    def __init__(
        self,
        packed: PackedTernary,
        alpha: Tensor | float,
        bias: Tensor | None = None,
        *,
        activation: str = "int8_absmax",
        multiple: float = 1,
        keep: float | None = None,
        backend: str = "auto",
    ) -> None:
        """alpha: a number above 0 for each row, or one for all. bias: a number for each row.

        Raises ValueError for an activation that there is not, a share that does not fit the width, and scales or a bias
        that do not fit the rows.
        """
        super().__init__()
        mode_of(activation, multiple)
        kept(keep, packed.in_features)
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.activation, self.multiple, self.keep, self.backend = activation, multiple, keep, backend
        self.register_buffer("weight", packed.data)
        self.register_buffer("alpha", _scales(alpha, packed))
        if bias is not None and (tuple(bias.shape) != (self.out_features,) or not bias.is_floating_point()):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} and {bias.dtype} for {self.out_features} rows of "
                             "weights; it has a floating-point number for each")  # fmt: skip
        self.register_buffer("bias", bias)
        self.register_buffer("layout", torch.tensor(self._layout(), dtype=torch.int32))
        self.register_load_state_dict_pre_hook(_check)

    def _layout(self) -> list[int]:
        """`layout`: version, rows, columns; which quantizer of `MODES`, its multiple, and how many entries it keeps."""
        kept_of = kept(self.keep, self.in_features)
        return [
            VERSION,
            self.out_features,
            self.in_features,
            list(MODES).index(self.activation),
            int(self.multiple),
            kept_of,
        ]

    @classmethod
    def from_linear(cls, *linears: nn.Linear, **options: object) -> TernaryLinear:
        """A layer for the latent weights of one `nn.Linear`, or of several that share their input, each with its own
        scale; their outputs follow each other. Options are those of the class.

        A subclass that quantizes in its `forward` is taken for its weight and bias. Raises ValueError for biases in
        some, for a weight of another shape than the layer's, and for a layer that has more than weight and bias: a norm
        of its own would be dropped unseen. (One that is written into `forward`, without a tensor of its own, cannot be
        seen: keep it in front as well.)
        """
        if not linears:
            raise ValueError("no layer: give an nn.Linear, or several that share their input")
        for linear in linears:
            if linear.weight.dtype == torch.uint8:
                raise ValueError(
                    f"{type(linear).__name__} has weights that are packed already, in a layout of its own: give the "
                    "latent ones; or codes -1, 0, 1 and what they are multiplied by, as "
                    "TernaryLinear(pack_ternary(codes), alpha) (of transformers' BitLinear alpha is 1 / weight_scale)"
                )
            if not hasattr(linear, "out_features") or not hasattr(linear, "in_features"):
                raise ValueError(f"{type(linear).__name__} is no nn.Linear: give one with its weight (rows, columns)")
            if tuple(linear.weight.shape) != (linear.out_features, linear.in_features):
                raise ValueError(
                    f"a weight of {' x '.join(map(str, linear.weight.shape))} for {linear.out_features} x "
                    f"{linear.in_features}: the scale is mean|W| of the whole matrix, which a shard does not have; "
                    "gather it first"
                )
            tensors = {name for name, _ in (*linear.named_parameters(), *linear.named_buffers())}
            if "weight_scale" in tensors:
                raise ValueError(
                    f"{type(linear).__name__} has weight_scale: its weights are -1, 0 and 1 already, and what comes "
                    "out, bias and all, is multiplied by it. Give TernaryLinear(pack_ternary(layer.weight.data), "
                    "layer.weight_scale), with layer.bias * layer.weight_scale where it has a bias; a norm that it has "
                    "goes in front"
                )
            if more := sorted(tensors - {"weight", "bias"}) or sorted(name for name, _ in linear.named_children()):
                raise ValueError(
                    f"{type(linear).__name__} has {', '.join(more)} beside weight and bias, which a packed layer would "
                    "drop: put its norm in front, nn.Sequential(layer.norm, TernaryLinear.from_linear(plain)), with "
                    "`plain` an nn.Linear of its weight"
                )
        biases: Sequence[Tensor | None] = [linear.bias for linear in linears]
        if any(b is None for b in biases) != all(b is None for b in biases):
            raise ValueError("some of the layers have a bias and some have none; make one of each kind")
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        return cls(*pack_weights([linear.weight for linear in linears]), bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features) of its dtype."""
        q = rmsnorm_quantize(
            x, None, self.activation, multiple=self.multiple, keep=self.keep, backend=self.backend
        )  # fmt: skip
        packed = PackedTernary(self.weight, self.out_features, self.in_features)
        # in float32 only where a bias is still to be added, so that the sum is rounded once
        dtype = x.dtype if self.bias is None else torch.float32
        y = ternary_linear(
            q.codes, q.scale, q.rowsum, packed, self.alpha, out_dtype=dtype, behind_norm=True, backend=self.backend
        )  # fmt: skip
        return y if self.bias is None else (y + self.bias).to(x.dtype)

    def _apply(self, fn, recurse=True):
        """`model.half()` and the like leave the scales in float32, where they are exact."""
        alpha = self.alpha
        super()._apply(fn, recurse)
        if self.alpha.dtype != torch.float32:
            self.alpha = alpha.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        """Sizes and quantizer."""
        keep = "" if self.keep is None else f", keep={self.keep}"
        return f"in_features={self.in_features}, out_features={self.out_features}, activation={self.activation}{keep}"


def _check(module: TernaryLinear, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Raises ValueError for weights of another layout or content than the module's, before any is copied."""
    names = ("layout", "weight", "alpha")
    found = {name: state[prefix + name] for name in names if prefix + name in state}
    if not found:  # strict=False may leave a layer as it is; strict says itself what is missing
        return
    if missing := [prefix + name for name in names if name not in found]:
        raise ValueError(
            f"packed weights without {', '.join(missing)}: a layer is saved with its layout, weights and scales; save "
            "the whole state_dict, or pack the latent weights anew with TernaryLinear.from_linear"
        )
    if found["layout"].shape != (6,):
        raise ValueError(
            f"{prefix}layout of shape {tuple(found['layout'].shape)}; it is version, rows, columns, and the "
            "quantizer's number, multiple and kept entries: pack the latent weights anew with TernaryLinear.from_linear"
        )
    version, rows, columns, *quantizer = found["layout"].tolist()
    if (rows, columns) != (module.out_features, module.in_features):
        raise ValueError(
            f"packed weights of {rows} x {columns} for a layer of {module.out_features} x {module.in_features}"
        )
    own = module._layout()[3:]
    if quantizer != own:
        raise ValueError(
            f"packed weights that were trained with {_named(quantizer)}, for a layer with {_named(own)}: make it with "
            "that activation, multiple and keep"
        )
    metadata = {"layout": LAYOUT, "layout_version": version, "out_features": rows, "in_features": columns}
    PackedTernary.load(found["weight"], metadata)
    state[prefix + "alpha"] = _scales(found["alpha"], module)


def _named(quantizer: Sequence[int]) -> str:
    """The last three numbers of `layout` in words."""
    number, multiple, entries = quantizer
    name = list(MODES)[number] if 0 <= number < len(MODES) else f"quantizer {number}, which is not known"
    return f"{name}, multiple {multiple}, {entries} entries kept"


def _scales(alpha: Tensor | float | None, rows: PackedTernary | TernaryLinear) -> Tensor:
    """float32 (rows,). Raises ValueError for another number of them, and for one that is not above 0."""
    if alpha is None:
        raise ValueError("no alpha: ternary weights have a scale for each matrix, mean|W| of its latent weight")
    given = torch.as_tensor(alpha).detach()
    device = rows.data.device if isinstance(rows, PackedTernary) else given.device
    if given.numel() != 1 and tuple(given.shape) != (rows.out_features,):
        raise ValueError(f"alpha of shape {tuple(given.shape)} for {rows.out_features} rows of weights; give one for "
                         "each row, with fused_alpha(alphas, rows) where several matrices lie in one")  # fmt: skip
    given = given.float()
    if not given.is_meta and not bool((given.isfinite() & (given > 0)).all()):
        raise ValueError("alpha has a value that is not above 0: it is mean|W| of each matrix; pack the weights anew")
    return given.reshape(-1).to(device).expand(rows.out_features).clone()
