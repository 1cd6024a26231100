"""The trunk of the decoder: embedding, blocks, final norm. Heads are in paperlm.models.llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, find_packed_sequence_indices
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from paperlm.errors import SpecError
from paperlm.models.config import PaperLlamaConfig
from paperlm.models.layers import Attention, DecoderLayer, Residual, RMSNorm, norm_maker, rope_tables
from paperlm.models.packed import PackedLinear


class PaperLlamaPreTrainedModel(PreTrainedModel):
    """Initialization, and what transformers may ask of the decoder; shared by trunk and heads."""

    config_class = PaperLlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["weight_scale"]
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": DecoderLayer, "attentions": Attention}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: see PaperLlamaConfig.register_for_auto_class."""

    def train(self, mode: bool = True) -> PaperLlamaPreTrainedModel:
        """As in PyTorch; SpecError for a model with packed weights, which nothing trains."""
        if mode and self.config.packed_weights is not None:
            raise SpecError(
                "packed weights are -1, 0 and 1 and cannot be trained: train the latent weights that they were packed "
                "from, then pack the result"
            )
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, getattr(module, "init_std", self.config.initializer_range))
            if isinstance(module, nn.Embedding) and self.config.zero_last_embedding_row:
                module.weight[-1].zero_()
        elif isinstance(module, PackedLinear):
            raise SpecError(
                f"a packed projection of {module.out_features} x {module.in_features} without a weight of that shape "
                "or its weight_scale: packed models are made of trained ones, by paperlm.models.packed.pack; make it "
                "again"
            )
        elif isinstance(module, Residual):
            module.reset_factors()
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
    """Embedding, blocks and final norm. Raises SpecError if the configuration asks for what is not implemented."""

    def __init__(self, config: PaperLlamaConfig) -> None:
        super().__init__(config)
        config.check()
        method, shape = config.method(), config.shape()
        padding_row = config.vocab_size - 1 if config.zero_last_embedding_row else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=padding_row)
        self.embed_tokens.init_std = method.init_std("embed", 0, shape)
        self.embed_multiplier = method.embed_multiplier(shape)
        self.spans_sequence = method.leaks_future
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        norm = norm_maker(method, shape, config.rms_norm_eps, RMSNorm)
        self.entry, self.exit = method.entry(shape, norm), method.exit(shape, norm)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head_dim = config.hidden_size // config.num_attention_heads
        cos, sin = rope_tables(self.head_dim, config.max_position_embeddings, config.rope_theta)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.gradient_checkpointing = False
        self.post_init()

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Final-normed states (B, S, D) of whole right-padded sequences: the training path, no mask and no cache.

        Causality alone keeps padding from real tokens. A method whose statistics span the sequence (`leaks_future`)
        takes padding into them here, as its authors' training did; `forward` with a mask leaves it out.
        """
        x = self._embed(input_ids)
        cos, sin = self._rope(slice(0, self._fits(x.shape[1])), x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self._leave(x)

    def streams(self, input_ids: Tensor) -> Iterator[Tensor]:
        """The residual stream (B, S, D) that enters the first block, then what leaves each; no norm on the last.

        Of whole right-padded sequences, as in `hidden`, whose states are the final norm of the last of them. A method
        with n streams has them side by side, (B, S, n*D).
        """
        x = self._embed(input_ids)
        cos, sin = self._rope(slice(0, self._fits(x.shape[1])), x.dtype)
        yield x
        for layer in self.layers:
            x = layer(x, cos, sin)
            yield x

    def _embed(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        return self._enter(x if self.embed_multiplier == 1.0 else x * self.embed_multiplier)

    def _enter(self, x: Tensor) -> Tensor:
        return x if self.entry is None else self.entry(x)

    def _leave(self, x: Tensor) -> Tensor:
        return self.norm(x if self.exit is None else self.exit(x))

    def _rope(self, positions: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.rope_cos[positions].to(dtype), self.rope_sin[positions].to(dtype)

    def _fits(self, length: int) -> int:
        """`length`; SpecError if it is more than the positions that there are."""
        if length > self.config.max_position_embeddings:
            raise SpecError(
                f"{length} tokens, and the model has {self.config.max_position_embeddings} positions "
                "(max_position_embeddings): shorten the input"
            )
        return length

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The transformers interface; masks are transformers' own.

        `attention_mask`: (B, keys), 0 on padding of either side, or (B, 1, S, keys) as transformers has it. Without
        one, documents packed into a row are told apart where `position_ids` (B, S) start anew. `inputs_embeds`
        (B, S, D) stand for the embedding's output, its multiplier included. `use_cache` defaults to the
        configuration's outside training. `output_hidden_states`: the stream entering each block, then the final-normed
        one; `streams` has what leaves the last block. `output_attentions` needs attn_implementation="eager".
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self._embed(input_ids) if inputs_embeds is None else self._enter(inputs_embeds)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        given = position_ids
        if position_ids is None:
            position_ids = self._positions(attention_mask, past, x)
        if not torch.compiler.is_compiling():
            self._fits(int(position_ids.max()) + 1)
        real = None
        if self.spans_sequence:
            real = self._real(attention_mask, given, past_key_values)
            use_cache = False
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,  # a fresh cache is made below: with one, packing is not looked for
            position_ids=position_ids,
        )
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        cos, sin = (table[:, None] for table in self._rope(position_ids, x.dtype))
        for layer in self.layers:
            x = layer(
                x,
                cos,
                sin,
                mask=mask,
                past_key_values=past_key_values,
                real=real,
                implementation=self.config._attn_implementation,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self._leave(x), past_key_values=past_key_values)

    def _positions(self, attention_mask: Tensor | None, past: int | Tensor, x: Tensor) -> Tensor:
        """(B or 1, S): the place of each token after `past` ones; padding, known from a 2-D mask, takes none."""
        places = torch.arange(x.shape[1], device=x.device) + past
        if attention_mask is None or attention_mask.ndim != 2:
            return places[None]
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0).index_select(1, places.to(attention_mask.device))

    @staticmethod
    def _real(attention_mask: Tensor | None, position_ids: Tensor | None, past_key_values: Any) -> Tensor | None:
        """(B, S), True where a token counts for statistics over the sequence; None if all do."""
        if past_key_values is not None:
            raise SpecError("this method's statistics span the sequence: generate with use_cache=False")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise SpecError("this method's statistics span the sequence: give a mask (B, S) of real tokens")
        unmasked = attention_mask is None and position_ids is not None
        if unmasked and find_packed_sequence_indices(position_ids) is not None:
            raise SpecError("this method's statistics span the sequence: give each document a row, without packing")
        return None if attention_mask is None else attention_mask.bool()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value
