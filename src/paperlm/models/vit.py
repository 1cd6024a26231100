"""A vision transformer for image classification, with any method of paperlm.norms.

    logits = H N_f( block_L( ... block_1( [c; P patches] + positions ) ) )[class token]

What is special: the wiring of each block comes from `config.norm`, through the same `Residual` as the decoder's; norms
are LayerNorm with bias; every variant ends with a final LayerNorm, Post-LN included. Shapes and start follow DeiT
(arXiv 2012.12877). What is absent: dropout, a distillation token, a pooler.

Shapes: B images, C channels, I pixels a side, S = 1 + (I / patch)^2 tokens, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import can_return_tuple

from paperlm.errors import SpecError, unknown
from paperlm.models.config import BASE_KEYS
from paperlm.models.layers import Residual, norm_maker, wired
from paperlm.norms import ModelShape, NormMethod, build_method


class PaperViTConfig(PreTrainedConfig):
    """Shape and method of the classifier; field names are those of transformers' ViTConfig where it has them.

    Raises SpecError for an unknown key.
    """

    model_type = "paperlm_vit"

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 192
    intermediate_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 3
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    norm: dict[str, Any] | None = None
    "`{name: ..., option: value}`, see paperlm.norms; None means pre_ln"

    def __post_init__(self, **kwargs: Any) -> None:
        known = {*type(self).__dataclass_fields__, "num_labels", *BASE_KEYS}
        for key in kwargs:
            if key not in known and not key.startswith("_"):
                raise SpecError(unknown("key of the model's configuration", key, known))
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise SpecError if no model can be built: patches, heads or method."""
        if self.image_size % self.patch_size:
            raise SpecError(f"image_size {self.image_size} does not split into patches of {self.patch_size} pixels")
        if self.hidden_size % self.num_attention_heads:
            raise SpecError(f"hidden_size {self.hidden_size} does not split into {self.num_attention_heads} heads")
        self.method()

    def shape(self) -> ModelShape:
        """What the normalization method may look at."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            n_layers=self.num_hidden_layers,
            initializer_range=self.initializer_range,
            embed_init_std=self.initializer_range,
        )

    def method(self) -> NormMethod:
        """The normalization method; raises SpecError if it does not exist or does not fit the shape."""
        method = build_method(self.norm or {"name": "pre_ln"})
        method.check(self.shape())
        return method


class ImageAttention(nn.Module):
    """Multi-head self-attention over all tokens, with biases."""

    def __init__(self, config: PaperViTConfig) -> None:
        super().__init__()
        self.n_heads = config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, D) -> the same."""
        heads = (*x.shape[:-1], self.n_heads, -1)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # PyTorch's CPU attention is three times slower backward in bfloat16 than in float32.
            with torch.autocast("cpu", enabled=False):
                out = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GELUNetwork(nn.Module):
    """down( gelu(up x) ), with biases."""

    def __init__(self, config: PaperViTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, D) -> the same."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class ImageBlock(nn.Module):
    """One block: attention, then feed-forward, each wired by the normalization method. `layer` counts from 1."""

    def __init__(self, config: PaperViTConfig, layer: int) -> None:
        super().__init__()
        method, shape = config.method(), config.shape()
        self.layer = layer
        self.attention = ImageAttention(config)
        self.mlp = GELUNetwork(config)
        self.attention_residual, self.mlp_residual = wired(layer, method, shape, config.layer_norm_eps, nn.LayerNorm)
        for tensor in ("q", "k", "v", "o"):
            getattr(self.attention, f"{tensor}_proj").init_std = method.init_std(tensor, layer, shape)
        for tensor in ("up", "down"):
            getattr(self.mlp, f"{tensor}_proj").init_std = method.init_std(tensor, layer, shape)

    def forward(self, x: Tensor, kept: Tensor | None = None, observer: Callable | None = None) -> Tensor:
        """The stream x (B, S, D) after the block. kept (B, 2): factors of the branches of attention and feed-forward.

        `observer`: PaperViTForImageClassification.observe_residuals.
        """
        factors: tuple[Any, Any] = (None, None)
        sublayers = ((self.attention_residual, self.attention), (self.mlp_residual, self.mlp))
        for index, (residual, f) in enumerate(sublayers):
            branch = residual.after(f(residual.before(x)))
            if observer is not None:
                observer(residual, x, branch)
            if kept is not None:
                branch = branch * kept[:, index, None, None].to(branch.dtype)
            x, factors = residual(x, branch, factors)
        return x


class PaperViTForImageClassification(PreTrainedModel):
    """The transformer with its linear head on the class token; loads and saves like any transformers model.

    Raises SpecError if the configuration asks for what is not implemented.
    """

    config_class = PaperViTConfig
    main_input_name = "pixel_values"
    _no_split_modules = ["ImageBlock"]

    def __init__(self, config: PaperViTConfig) -> None:
        super().__init__(config)
        config.check()
        method, shape = config.method(), config.shape()
        side = config.image_size // config.patch_size
        self.patches = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.positions = nn.Parameter(torch.zeros(1, 1 + side * side, config.hidden_size))
        self.embed_std = method.init_std("embed", 0, shape)
        self.embed_multiplier = method.embed_multiplier(shape)
        self.layers = nn.ModuleList(ImageBlock(config, layer) for layer in range(1, config.num_hidden_layers + 1))
        norm = norm_maker(method, shape, config.layer_norm_eps, nn.LayerNorm)
        self.entry, self.exit = method.entry(shape, norm), method.exit(shape, norm)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.classifier.init_std = method.init_std("head", 0, shape)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, module.init_std)
            module.bias.zero_()
        elif isinstance(module, nn.Conv2d):
            module.reset_parameters()  # DeiT's code leaves the patches to PyTorch
        elif isinstance(module, Residual):
            module.reset_factors()
        elif isinstance(module, PaperViTForImageClassification):
            nn.init.normal_(module.class_token, 0.0, module.embed_std)
            nn.init.normal_(module.positions, 0.0, module.embed_std)
        elif isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.ndim == 1:
            module.weight.fill_(1.0)
            module.bias.zero_()

    def logits(self, pixel_values: Tensor, kept: Tensor | None = None) -> Tensor:
        """(B, classes). pixel_values: (B, C, I, I).

        kept (B, L, 2): what each branch of each image is multiplied with, for stochastic depth; None: 1. Raises
        SpecError for images of another shape.
        """
        x = self._embed(pixel_values)
        for index, layer in enumerate(self.layers):
            x = layer(x, None if kept is None else kept[:, index])
        return self.classifier(self.norm(x if self.exit is None else self.exit(x))[:, 0])

    def streams(self, pixel_values: Tensor, kept: Tensor | None = None) -> Iterator[Tensor]:
        """The stream (B, S, D) that enters the first block, then what leaves each; no norm on the last."""
        x = self._embed(pixel_values)
        yield x
        for index, layer in enumerate(self.layers):
            x = layer(x, None if kept is None else kept[:, index])
            yield x

    def _embed(self, pixel_values: Tensor) -> Tensor:
        config = self.config
        expected = (config.num_channels, config.image_size, config.image_size)
        if pixel_values.shape[1:] != expected:
            raise SpecError(f"images of shape {tuple(pixel_values.shape[1:])}; the model takes {expected}: resize them")
        x = self.patches(pixel_values.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1).to(x.dtype), x), 1) + self.positions
        x = x if self.embed_multiplier == 1.0 else x * self.embed_multiplier
        return x if self.entry is None else self.entry(x)

    def summed_loss(self, pixel_values: Tensor, targets: Tensor, kept: Tensor | None = None) -> Tensor:
        """Sum of cross-entropies, float32. targets (B, classes) are probabilities: mixed or smoothed labels."""
        return F.cross_entropy(self.logits(pixel_values, kept).float(), targets, reduction="sum")

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """The transformers interface: logits (B, classes), and with `labels` (B,) the mean cross-entropy."""
        logits = self.logits(pixel_values)
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def observe_residuals(self, pixel_values: Tensor, observer: Callable[[Residual, Tensor, Tensor], None]) -> None:
        """Run one forward pass and call observer(residual, x, branch) before each residual sum, in network order.

        x is the stream that enters the sum, branch what is added to it, N_post included; both (B, S, D).
        """
        x = self._embed(pixel_values)
        for layer in self.layers:
            x = layer(x, observer=observer)


def register() -> None:
    """Let transformers' Auto classes build and load the classifier; safe to call twice."""
    AutoConfig.register(PaperViTConfig.model_type, PaperViTConfig, exist_ok=True)
    AutoModelForImageClassification.register(PaperViTConfig, PaperViTForImageClassification, exist_ok=True)


register()
