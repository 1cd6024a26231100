"""The LLaMA-style decoder of the normalization papers, with any method of paperlm.norms.

    logits = H N_f( block_L( ... block_1( E[ids] ) ) )

What is special: the wiring of each block comes from `config.norm`; embedding and head are not tied; every variant
ends with a final RMSNorm, Post-LN included. What is absent: dropout, biases, grouped key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from paperlm.errors import SpecError
from paperlm.models.layers import DecoderLayer, Residual, RMSNorm, rope_tables
from paperlm.models.losses import MATERIALISED, summed_fused_loss
from paperlm.norms import ModelShape, NormMethod, build_method

IGNORE_INDEX = -100


class PaperLlamaConfig(PreTrainedConfig):
    """Shape and method of a decoder; field names are those of transformers' LlamaConfig where it has them."""

    model_type = "paperlm_llama"
    auto_map: ClassVar[dict[str, str]] = {}

    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    embed_init_std: float = 0.02
    zero_last_embedding_row: bool = False
    "True: row vocab_size-1 is zero and gets no gradient, the side effect of pad_token_id = -1 in the authors' configs"
    norm: dict[str, Any] | None = None
    "`{name: ..., option: value}`, see paperlm.norms; None means pre_ln"
    layer_numbers: list[int] | None = None
    "training-time number of each block still present; None means 1..num_hidden_layers"
    trained_layers: int | None = None
    "depth at training time; None means num_hidden_layers"
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = 1
    num_labels: int = 1

    def shape(self) -> ModelShape:
        """What the normalization method may look at."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            n_layers=self.trained_layers or self.num_hidden_layers,
            initializer_range=self.initializer_range,
            embed_init_std=self.embed_init_std,
        )

    def method(self) -> NormMethod:
        """The normalization method; raises SpecError if it does not exist or does not fit the shape."""
        method = build_method(self.norm or {"name": "pre_ln"})
        method.check(self.shape())
        return method


class PaperLlamaPreTrainedModel(PreTrainedModel):
    """Initialization, shared by the three heads."""

    config_class = PaperLlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, getattr(module, "init_std", self.config.initializer_range))
            if isinstance(module, nn.Embedding) and self.config.zero_last_embedding_row:
                module.weight[-1].zero_()
        elif isinstance(module, Residual):
            for factor in (module.residual_scale, module.branch_scale):
                if isinstance(factor, nn.Parameter):
                    factor.fill_(factor.start_value)
        elif isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.ndim == 1:
            module.weight.fill_(1.0)
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                module.bias.zero_()
        elif isinstance(module, PaperLlamaModel):
            # Non-persistent buffers are empty after loading on the meta device.
            cos, sin = rope_tables(module.head_dim, self.config.max_position_embeddings, self.config.rope_theta)
            module.rope_cos.copy_(cos)
            module.rope_sin.copy_(sin)


class PaperLlamaModel(PaperLlamaPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: PaperLlamaConfig) -> None:
        super().__init__(config)
        method, shape = config.method(), config.shape()
        if config.hidden_size % config.num_attention_heads or (config.hidden_size // config.num_attention_heads) % 2:
            raise SpecError(
                f"hidden_size {config.hidden_size} does not split into {config.num_attention_heads} heads of even width"
            )
        numbers = config.layer_numbers or list(range(1, config.num_hidden_layers + 1))
        if len(numbers) != config.num_hidden_layers:
            raise SpecError(
                f"layer_numbers names {len(numbers)} blocks, num_hidden_layers is {config.num_hidden_layers}"
            )
        padding_row = config.vocab_size - 1 if config.zero_last_embedding_row else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=padding_row)
        self.embed_tokens.init_std = method.init_std("embed", 0, shape)
        self.embed_multiplier = method.embed_multiplier(shape)
        self.layers = nn.ModuleList(
            DecoderLayer(number, index, method, shape, config.num_attention_heads, config.rms_norm_eps)
            for index, number in enumerate(numbers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head_dim = config.hidden_size // config.num_attention_heads
        cos, sin = rope_tables(self.head_dim, config.max_position_embeddings, config.rope_theta)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.post_init()

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Final-normed states (B, S, D) of whole right-padded sequences: the training path, no mask and no cache."""
        x = self._embed(input_ids)
        cos, sin = self._rope(slice(0, input_ids.shape[1]), x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def _embed(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        return x if self.embed_multiplier == 1.0 else x * self.embed_multiplier

    def _rope(self, positions: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.rope_cos[positions].to(dtype), self.rope_sin[positions].to(dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The transformers interface. `attention_mask`: (B, keys), 0 on padding of either side.

        `hidden_states` of the result are the stream entering each block, then the final-normed stream.
        """
        x = self._embed(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        n_tokens = x.shape[1]
        mask = None
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            mask = _causal_mask(attention_mask.bool(), n_tokens)
            if position_ids is None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -n_tokens:]
        elif past and n_tokens > 1:
            mask = _causal_mask(torch.ones(x.shape[0], past + n_tokens, dtype=torch.bool, device=x.device), n_tokens)
        if position_ids is None:
            position_ids = torch.arange(past, past + n_tokens, device=x.device)[None]
        cos, sin = (table[:, None] for table in self._rope(position_ids, x.dtype))
        states = [x] if output_hidden_states else None
        for layer in self.layers:
            x = layer(x, cos, sin, mask, past_key_values if use_cache else None)
            if states is not None:
                states.append(x)
        x = self.norm(x)
        if states is not None:
            states[-1] = x
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(states) if states is not None else None,
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value


def _causal_mask(allowed: Tensor, n_tokens: int) -> Tensor:
    """(B, keys) of real keys -> (B, 1, n_tokens, keys), True where attention is allowed; no row is empty."""
    n_keys = allowed.shape[1]
    causal = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=allowed.device).tril(n_keys - n_tokens)
    diagonal = torch.eye(n_keys, dtype=torch.bool, device=allowed.device)[-n_tokens:]
    return ((allowed[:, None, :] & causal) | diagonal)[:, None]


class PaperLlamaForCausalLM(PaperLlamaPreTrainedModel, GenerationMixin):
    """The decoder with its language-model head; loads, saves and generates like any transformers model."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, config: PaperLlamaConfig) -> None:
        super().__init__(config)
        self.model = PaperLlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.init_std = config.method().init_std("head", 0, config.shape())
        self.leaks_future = config.method().leaks_future
        self.post_init()
        if self.leaks_future:
            self.generation_config.use_cache = False

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, S, V); with `labels` (B, S, -100 ignored) also the mean next-token cross-entropy."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        if self.leaks_future:
            # With a cache, statistics over the sequence would be those of the newest tokens only: another function.
            if past_key_values is not None:
                raise SpecError("this method's statistics span the sequence: generate with use_cache=False")
            use_cache = False
        output_hidden_states = kwargs.pop("output_hidden_states", None)
        num_items = kwargs.pop("num_items_in_batch", None)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    def token_losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each next token, float32, (B, S-1), 0 where the label is ignored: evaluation's path.

        `labels` are the ids with -100 on padding; position t predicts label t+1.
        """
        logits = self.lm_head(self.model.hidden(input_ids[:, :-1]))
        targets = labels[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=-100)
        return losses.view(targets.shape)

    def summed_loss(self, input_ids: Tensor, labels: Tensor, loss: str = MATERIALISED) -> Tensor:
        """Sum of next-token cross-entropies over the labels that count: the training path. `loss`: RunConfig.loss."""
        # The last position predicts nothing; keeping it leaves every product at an aligned number of rows.
        hidden = self.model.hidden(input_ids)
        if loss != MATERIALISED:
            return summed_fused_loss(hidden, self.lm_head.weight, labels, loss, IGNORE_INDEX)
        logits = self.lm_head(hidden)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
        )

    def observe_residuals(self, input_ids: Tensor, observer: Callable[[Residual, Tensor, Tensor], None]) -> None:
        """Run one forward pass and call observer(residual, x, branch) before each residual sum, in network order."""
        x = self.model._embed(input_ids)
        cos, sin = self.model._rope(slice(0, input_ids.shape[1]), x.dtype)
        for layer in self.model.layers:
            attend = lambda h, layer=layer: layer.attention(h, cos, sin)  # noqa: E731
            for residual, f in ((layer.attention_residual, attend), (layer.mlp_residual, layer.mlp)):
                observer(residual, x, residual.branch(x, f))
                x = residual(x, f, shared=layer.attention_residual)

    def without_layer(self, layer: int) -> PaperLlamaForCausalLM:
        """A copy without the block numbered `layer` at training time; the others keep their number and wiring."""
        numbers = [block.layer for block in self.model.layers]
        if layer not in numbers:
            raise SpecError(f"no block {layer} to remove; present: {numbers}")
        config = PaperLlamaConfig.from_dict(self.config.to_dict())
        config.trained_layers = self.config.trained_layers or self.config.num_hidden_layers
        config.layer_numbers = [n for n in numbers if n != layer]
        config.num_hidden_layers = len(config.layer_numbers)
        pruned = PaperLlamaForCausalLM(config).to(device=self.device, dtype=self.dtype)
        index = {n: i for i, n in enumerate(numbers)}
        for i, n in enumerate(config.layer_numbers):
            pruned.model.layers[i].load_state_dict(self.model.layers[index[n]].state_dict())
        pruned.model.embed_tokens.load_state_dict(self.model.embed_tokens.state_dict())
        pruned.model.norm.load_state_dict(self.model.norm.state_dict())
        pruned.lm_head.load_state_dict(self.lm_head.state_dict())
        return pruned.train(self.training)


class PaperLlamaForSequenceClassification(PaperLlamaPreTrainedModel):
    """The decoder with a linear score at the last real token: reward models."""

    def __init__(self, config: PaperLlamaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PaperLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutputWithPast:
        """Scores (B, num_labels) of the last token that is not padding."""
        kwargs.pop("use_cache", None)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
        if attention_mask is not None:
            real = attention_mask.long()
        else:
            real = (input_ids != self.config.pad_token_id).long()
        last = (real * torch.arange(real.shape[1], device=real.device)).argmax(-1)
        logits = self.score(out.last_hidden_state[torch.arange(len(last), device=last.device), last])
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, hidden_states=out.hidden_states)


def register() -> None:
    """Let transformers' Auto classes build and load the decoder; safe to call twice."""
    AutoConfig.register(PaperLlamaConfig.model_type, PaperLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(PaperLlamaConfig, PaperLlamaForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(PaperLlamaConfig, PaperLlamaForSequenceClassification, exist_ok=True)


register()
