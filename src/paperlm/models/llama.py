"""The LLaMA-style decoder of the normalization papers, with any method of paperlm.norms.

    logits = H N_f( block_L( ... block_1( E[ids] ) ) )

What is special: the wiring of each block comes from `config.norm`, its quantizers from `config.quantization`; every
variant ends with a final RMSNorm, Post-LN included. What is absent: dropout, biases, grouped key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
)
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast
from transformers.utils import can_return_tuple

from paperlm.errors import SpecError
from paperlm.models.config import PaperLlamaConfig
from paperlm.models.decoder import PaperLlamaModel, PaperLlamaPreTrainedModel
from paperlm.models.layers import Residual
from paperlm.models.losses import MATERIALISED, summed_fused_loss

IGNORE_INDEX = -100


class PaperLlamaForCausalLM(PaperLlamaPreTrainedModel, GenerationMixin):
    """The decoder with its language-model head; loads, saves and generates like any transformers model."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PaperLlamaConfig) -> None:
        super().__init__(config)
        self.model = PaperLlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.init_std = config.method().init_std("head", 0, config.shape())
        self.post_init()
        if self.model.spans_sequence:
            self.generation_config.use_cache = False

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    @can_return_tuple
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
        """Logits (B, S, V), and with `labels` (B, S, -100 ignored) the mean next-token cross-entropy.

        `shift_labels` (B, S) are labels that stand where they are predicted already. With `num_items_in_batch` the sum
        of the losses is divided by it. `logits_to_keep`: the last so many positions, or an index as in transformers:
        (K,) for all rows, (B, K) a row, or a mask (B, S). The rest is PaperLlamaModel.forward's.
        """
        wants_loss = labels is not None or kwargs.get("shift_labels") is not None
        if use_cache is None and wants_loss:
            use_cache = False
        loss_options = {k: kwargs.pop(k) for k in ("num_items_in_batch", "shift_labels") if k in kwargs}
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(_positions_kept(out.last_hidden_state, logits_to_keep))
        loss = None
        if wants_loss:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; SpecError where the last row of the table has a meaning of its own."""
        if self.config.zero_last_embedding_row and new_num_tokens not in (None, self.config.vocab_size):
            raise SpecError("zero_last_embedding_row: the last row is held at zero, so the table keeps its size")
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def token_losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each next token, float32, (B, S-1), 0 where the label is ignored: evaluation's path.

        `labels` are the ids with -100 on padding; position t predicts label t+1.
        """
        logits = self.lm_head(self.model.hidden(input_ids[:, :-1]))
        targets = labels[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=-100)
        return losses.view(targets.shape)

    def summed_loss(self, input_ids: Tensor, labels: Tensor, loss: str = MATERIALISED) -> Tensor:
        """Sum of next-token cross-entropies over the labels that count: the training path. `loss`: a pretrain job's."""
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
        """Run one forward pass and call observer(residual, x, branch) before each residual sum, in network order.

        x is the stream that enters the sum, branch what is added to it, N_post included; both (B, S, D).
        """
        x = self.model._embed(input_ids)
        cos, sin = self.model._rope(slice(0, input_ids.shape[1]), x.dtype)
        for layer in self.model.layers:
            attend = lambda h, layer=layer: layer.attention(h, cos, sin)[0]  # noqa: E731
            factors = (None, None)
            for residual, f in ((layer.attention_residual, attend), (layer.mlp_residual, layer.mlp)):
                branch = residual.after(f(residual.before(x)))
                observer(residual, x, branch)
                x, factors = residual(x, branch, factors)


class PaperLlamaForSequenceClassification(PaperLlamaPreTrainedModel):
    """The decoder with a linear score at the last real token: reward models."""

    accepts_loss_kwargs = False
    "Trainers divide the loss by the steps that they accumulate: it is the mean of each batch."

    def __init__(self, config: PaperLlamaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PaperLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Scores (B, num_labels) of the last token that is not padding.

        Padding is where a 2-D `attention_mask` is 0; without one, where ids are the padding's; embeddings have none.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        states = out.last_hidden_state
        if attention_mask is not None and attention_mask.ndim == 2:
            real = attention_mask[:, -states.shape[1] :].long()
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = (input_ids != self.config.pad_token_id).long()
        else:
            real = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        last = (real * torch.arange(real.shape[1], device=real.device)).argmax(-1)
        logits = self.score(states[torch.arange(len(last), device=last.device), last])
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


def _positions_kept(states: Tensor, keep: int | Tensor) -> Tensor:
    """The positions of (B, S, D) that `logits_to_keep` names."""
    if isinstance(keep, int):
        return states[:, -keep:] if keep else states
    if keep.ndim == 1:
        return states[:, keep]
    return states[keep] if keep.dtype == torch.bool else torch.take_along_dim(states, keep[..., None], dim=1)


def register() -> None:
    """Let transformers' Auto classes build and load the decoder; safe to call twice."""
    AutoConfig.register(PaperLlamaConfig.model_type, PaperLlamaConfig, exist_ok=True)
    AutoModel.register(PaperLlamaConfig, PaperLlamaModel, exist_ok=True)
    AutoModelForCausalLM.register(PaperLlamaConfig, PaperLlamaForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(PaperLlamaConfig, PaperLlamaForSequenceClassification, exist_ok=True)


register()
