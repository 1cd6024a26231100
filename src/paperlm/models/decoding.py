"""Token after token from a trained BitNet model: packed weights, static caches, and one CUDA graph a token on a GPU.

With a quantized cache and squared ReLU a block is eleven launches: four of a norm with a quantizer, four products (q, k
and v in one; gate and up in one with what becomes of them), the rotary embedding with the cache's new rows, attention
in two. The numbers are the model's up to rounding, between product, norm and quantizer less is rounded to the model's
dtype, and up to codes next to a tie, which rounding turns over: with a few-bit cache those that follow differ by it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from paperlm_kernels.kv_attention import QuantizedKV
from paperlm_kernels.kv_attention.reference import rotated
from paperlm_kernels.rmsnorm_quantize import Quantized, rmsnorm_quantize
from paperlm_kernels.rmsnorm_quantize.modes import MODES
from paperlm_kernels.ternary_linear import (
    PackedTernary,
    fused_alpha,
    pack_ternary,
    ternary_gated,
    ternary_linear,
    unpack_ternary,
)
from torch import Tensor

from paperlm.errors import SpecError
from paperlm.models.config import PaperLlamaConfig
from paperlm.models.layers import ACTIVATIONS, rope_tables, squared_relu
from paperlm.models.llama import PaperLlamaForCausalLM
from paperlm.models.packed import PackedLinear
from paperlm.quantizers.scheme import InputQuantizer, kv_cache_of


class Weights(Protocol):
    """Where a decoder's weights come from, by their names in the model."""

    def ternary(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes -1, 0, 1 (rows, columns) of a projection, and its scale."""

    def plain(self, name: str) -> Tensor:
        """Any other parameter."""


class ModelWeights:
    """Those of a model with latent or packed weights."""

    def __init__(self, model: PaperLlamaForCausalLM) -> None:
        self.model = model

    def ternary(self, name: str) -> tuple[Tensor, Tensor]:
        module = self.model.get_submodule(name)
        if isinstance(module, PackedLinear):
            return unpack_ternary(module.look()), module.weight_scale
        codes, scale = module.quantizer.quantize(module.whole_weight().detach())
        if not bool(scale.isfinite().all()):
            raise SpecError(f"{name}.weight has numbers that are not finite: train on from a checkpoint before them")
        return codes, scale

    def plain(self, name: str) -> Tensor:
        found = self.model.get_parameter(name)
        if hasattr(found, "full_tensor"):
            raise SpecError(f"{name} is a shard: gather the model's weights before it is decoded with")
        return found.detach()


FAST_HEADS = 8
"PyTorch's attention in 16 bits has a fast form for heads of a multiple of this."


class StaticKV:
    """Keys and values of a layer as they are, with the methods of QuantizedKV that a decoder calls. Heads are filled up
    with zeros to a multiple of FAST_HEADS: 3B's 100 numbers to 104."""

    def __init__(self, batch: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.head_dim, self.filling = head_dim, -head_dim % FAST_HEADS
        shape = (batch, heads, capacity, head_dim + self.filling)
        self.padded_keys, self.padded_values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.keys, self.values = (held[..., :head_dim] for held in (self.padded_keys, self.padded_values))
        self.rows = torch.arange(batch, device=device)

    def append(self, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q: Tensor, position: Tensor) -> Tensor:
        """k, v, q (B, 1, H, D) at positions (B,); the turned q."""
        self.keys[self.rows, :, position] = rotated(k, cos, sin).to(k.dtype)[:, 0]
        self.values[self.rows, :, position] = v[:, 0]
        return rotated(q, cos, sin).to(q.dtype)

    def decode(self, q: Tensor, there: Tensor) -> Tensor:
        """q (B, H, D) over the positions that are `there` (B, capacity)."""
        q = F.pad(q[:, :, None], (0, self.filling))
        out = F.scaled_dot_product_attention(
            q, self.padded_keys, self.padded_values, attn_mask=there[:, None, None], scale=1 / math.sqrt(self.head_dim)
        )
        return out[..., : self.head_dim]


@dataclasses.dataclass(frozen=True)
class Product:
    """Projections that share their input, one below the other, and what makes that input."""

    packed: PackedTernary
    alpha: Tensor
    gain: Tensor | None
    "of the norm in front of the quantizer"
    quantizer: InputQuantizer
    eps: float

    @classmethod
    def of(
        cls, weights: Weights, names: list[str], norm: str | None, quantizer: InputQuantizer, eps: float,
        dtype: torch.dtype, device: torch.device,
    ) -> Product:  # fmt: skip
        codes, alphas = zip(*(weights.ternary(name) for name in names), strict=True)
        gain = None if norm is None else weights.plain(f"{norm}.weight").to(device, dtype)
        alpha = fused_alpha(alphas, [len(c) for c in codes]).to(device)
        return cls(pack_ternary(torch.cat(codes).to(device)), alpha, gain, quantizer, eps)

    def entering(self, x: Tensor, residual: Tensor | None = None) -> Quantized:
        """What the projections read of x, or of x + residual."""
        chosen = self.quantizer.quantizer
        return rmsnorm_quantize(
            x, self.gain, chosen.name, eps=self.eps, multiple=getattr(chosen, "multiple", 1),
            keep=self.quantizer.keep, residual=residual,
        )  # fmt: skip

    def __call__(
        self, q: Quantized, dtype: torch.dtype, function: Callable[..., Tensor] = ternary_linear
    ) -> Tensor:  # fmt: skip
        """The product in dtype, or what `function` makes of it."""
        return function(q.codes, q.scale, q.rowsum, self.packed, self.alpha, out_dtype=dtype, behind_norm=True)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block's four products and its cache."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    cache: QuantizedKV | StaticKV
    reader: QuantizedKV | None
    "the same cache, of the length that it has when the new position is in it"


class PackedDecoder:
    """Greedy decoding of `batch` sequences of up to `capacity` positions, which advance together.

    `ids` (B,) are the tokens that are read next, `position` (B,) where they stand: buffers that a CUDA graph finds
    again. Raises SpecError for a model that is not wired as BitNet's (Pre-LN, ternary weights, every input quantized by
    a quantizer that the kernels have), and for more positions than it was made for.
    """

    def __init__(
        self, config: PaperLlamaConfig, weights: Weights, *, batch: int, capacity: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        _check(config, capacity)
        device, eps, scheme = torch.device(device), config.rms_norm_eps, config.quantizers()
        self.dtype, self.heads, self.capacity, self.eps = dtype, config.num_attention_heads, capacity, eps
        self.head_dim, self.act = config.hidden_size // self.heads, ACTIVATIONS[config.hidden_act]
        self.position = torch.zeros(batch, dtype=torch.int32, device=device)
        self.length = self.position + 1
        self.ids = torch.zeros(batch, dtype=torch.long, device=device)
        self.embed = weights.plain("model.embed_tokens.weight").to(device, dtype)
        tied = config.tie_word_embeddings
        self.head = self.embed if tied else weights.plain("lm_head.weight").to(device, dtype)
        self.norm = weights.plain("model.norm.weight").to(device, dtype)
        tables = rope_tables(self.head_dim, capacity, config.rope_theta)
        self.cos, self.sin = (table[:, : self.head_dim // 2].to(device).contiguous() for table in tables)
        self.places = torch.arange(capacity, device=device)
        self.kv = None if config.kv_cache is None else kv_cache_of(config.kv_cache)
        self.blocks = []
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"

            def product(part: str, names: tuple[str, ...], norm: str | None, place: str, at: str = at) -> Product:
                names = [f"{at}.{part}.{name}_proj" for name in names]
                norm = norm and f"{at}.{norm}"
                return Product.of(weights, names, norm, getattr(scheme, place), eps, dtype, device)

            attention, mlp = ("attention.sub_norm", "mlp.sub_norm") if config.sub_norm else (None, None)
            cache, reader = self._cache(batch, device)
            self.blocks.append(Block(
                product("attention", ("q", "k", "v"), "attention_residual.pre_norm", "qkv"),
                product("attention", ("o",), attention, "o"),
                product("mlp", ("gate", "up"), "mlp_residual.pre_norm", "gate_up"),
                product("mlp", ("down",), mlp, "down"),
                cache, reader,
            ))  # fmt: skip

    @classmethod
    def of(cls, model: PaperLlamaForCausalLM, *, batch: int, capacity: int) -> PackedDecoder:
        """A decoder in the dtype and on the device of a model, whose weights may be latent or packed."""
        weights = ModelWeights(model)
        return cls(model.config, weights, batch=batch, capacity=capacity, dtype=model.dtype, device=model.device)

    def _cache(self, batch: int, device: torch.device) -> tuple[QuantizedKV | StaticKV, QuantizedKV | None]:
        if self.kv is None:
            return StaticKV(batch, self.heads, self.head_dim, self.capacity, self.dtype, device), None
        described = self.kv.described
        cache = QuantizedKV.empty(
            batch, self.heads, self.head_dim, self.capacity, bits=described["kv_bits"], mapping=described["mapping"],
            first_bits=described["first_bits"], device=device,
            step_dtype=torch.float32 if self.dtype == torch.float32 else torch.float16,
        )  # fmt: skip
        cache = dataclasses.replace(cache, lengths=self.position)
        return cache, dataclasses.replace(cache, lengths=self.length)

    def rewind(self, position: int = 0) -> None:
        """The next tokens stand at `position`; what the caches have before it stays."""
        self.position.fill_(position)
        self.length.fill_(position + 1)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Logits (B, V) behind `ids`, which are in the caches then."""
        x, branch = F.embedding(self.ids, self.embed), None
        cos, sin = (table[self.position][:, None] for table in (self.cos, self.sin))
        there = self.places <= self.position[:, None] if self.kv is None else None
        for block in self.blocks:
            entering = block.qkv.entering(x, residual=branch)
            x = x if branch is None else entering.stream
            heads = block.qkv(entering, self.dtype).view(len(x), 1, 3, self.heads, self.head_dim)
            q, k, v = heads.unbind(2)
            if self.kv is None:
                out = block.cache.decode(block.cache.append(k, v, cos, sin, q, self.position)[:, 0], there)
            else:
                turned = block.cache.append(k, v, cos, sin, q=q, advance=False)
                out = block.reader.decode(turned[:, 0], q_bits=self.kv.described["q_bits"])
            branch = block.o(block.o.entering(out.reshape(x.shape)), self.dtype)
            entering = block.gate_up.entering(x, residual=branch)
            x = entering.stream
            opened = self._opened(block.gate_up, entering)
            branch = block.down(block.down.entering(opened), self.dtype)
        self.position += 1
        self.length += 1
        return F.linear(F.rms_norm(x + branch, self.norm.shape, self.norm, self.eps), self.head)

    def _opened(self, product: Product, entering: Quantized) -> Tensor:
        """act(gate) * up of the feed-forward: with squared ReLU within the product's kernel."""
        if self.act is squared_relu:
            return product(entering, self.dtype, ternary_gated)
        gate, up = product(entering, self.dtype).chunk(2, dim=-1)
        return self.act(gate) * up

    def advance(self) -> None:
        """The likeliest next tokens take the place of `ids`. Nothing here waits for the device."""
        self.ids.copy_(self.step().argmax(-1))

    def generate(self, prompt: Tensor, count: int) -> Tensor:
        """`count` tokens behind each row of prompt (B, S), int64 (B, count); the prompt is read a token at a time.

        Raises SpecError where there is no room for them, and for a prompt that is no tensor of ids.
        """
        if count < 1:
            raise SpecError(f"{count} tokens to generate; give 1 or more")
        if not isinstance(prompt, Tensor) or prompt.dtype not in (torch.int64, torch.int32):
            what = f"{prompt.dtype}" if isinstance(prompt, Tensor) else f"a {type(prompt).__name__}"
            raise SpecError(f"a prompt of {what}; give token ids, an int64 tensor ({len(self.ids)}, 1 or more)")
        if prompt.ndim != 2 or prompt.shape[0] != len(self.ids) or prompt.shape[1] < 1:
            raise SpecError(f"a prompt of shape {tuple(prompt.shape)}; this decoder reads ({len(self.ids)}, 1 or more)")
        if prompt.shape[1] + count - 1 > self.capacity:
            raise SpecError(
                f"{prompt.shape[1]} tokens and {count} more in caches for {self.capacity}; make a decoder of a larger "
                "capacity"
            )
        if not bool(((prompt >= 0) & (prompt < len(self.embed))).all()):
            raise SpecError(f"a prompt with token ids beyond 0 to {len(self.embed) - 1}, the model's vocabulary")
        self.rewind()
        for ids in prompt.T:
            self.ids.copy_(ids)
            self.advance()
        found = [self.ids.clone()]
        once = captured(self) if self.ids.is_cuda and count > 1 else self.advance
        for _ in range(count - 1):
            once()
            found.append(self.ids.clone())
        return torch.stack(found, 1)


def captured(decoder: PackedDecoder) -> Callable[[], None]:
    """`decoder.advance` as one CUDA graph; the decoder stays where it is."""
    start, ids = int(decoder.position[0]), decoder.ids.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.advance()
    decoder.rewind(start)
    decoder.ids.copy_(ids)
    return graph.replay


def _check(config: PaperLlamaConfig, capacity: int) -> None:
    scheme, most = config.quantizers(), config.max_position_embeddings
    if capacity > most:
        raise SpecError(f"caches for {capacity} positions; the model was made for {most} (max_position_embeddings)")
    if scheme is None or scheme.weight is None or scheme.weight.name != "ternary_absmean":
        raise SpecError("quantization: a packed decoder is for weights of the quantizer ternary_absmean")
    for place in ("qkv", "o", "gate_up", "down"):
        if getattr(scheme, place) is None:
            raise SpecError(f"quantization.{place}: nothing quantizes this input; use the model itself")
        if (name := getattr(scheme, place).quantizer.name) not in MODES:
            raise SpecError(
                f"quantization.{place}: the kernels have {', '.join(MODES)}, and no {name!r}; use the model itself"
            )
    if config.kv_cache is not None and kv_cache_of(config.kv_cache).described["first_bits"] > 4:
        raise SpecError("kv_cache.first_bits: packed caches have 3 or 4 bits at position 0; use the model itself")
    if (config.norm or {"name": "pre_ln"})["name"] != "pre_ln":
        raise SpecError(f"norm: {config.norm['name']!r}; a packed decoder is wired as 'pre_ln'; use the model itself")
