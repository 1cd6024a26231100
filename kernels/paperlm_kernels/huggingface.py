"""The fused loss inside one instance of a causal language model of transformers.

    model = use_fused_loss(AutoModelForCausalLM.from_pretrained(...), filter_grads="hidden")

Only this instance changes: its forward and its options are attributes of it. What the loss has to know about the
model's logits (cap, scale, bias) comes from its config and head, and is compared with the logits of the stock forward
pass before anything is replaced, since a transform that is missed would train another model without any sign of it.

| call                                                  | forward pass                                              |
|-------------------------------------------------------|-----------------------------------------------------------|
| training mode, with labels                            | fused loss, `logits=None`                                 |
| evaluation mode, with labels                          | stock, with logits for metrics; fused if the call has     |
|                                                       | skip_logits=True or the instance logits_in_eval=False     |
| without labels (generation), or skip_logits=False     | stock                                                     |
| router logits asked for                               | stock, which adds their loss; logged once                 |

`num_items_in_batch`, `shift_labels` and `ignore_index` mean what they mean to the stock loss, so the Trainer of
transformers works unchanged. The SFTTrainer of trl 1.16 has a fused head of its own and never asks the model for a
loss.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from paperlm_kernels.cross_entropy.dense import dense_logits
from paperlm_kernels.cross_entropy.function import LinearCrossEntropyLoss, linear_cross_entropy

log = logging.getLogger(__name__)

# What config attributes do to the logits: a cap, a factor, or a divisor.
TRANSFORMS = {
    "final_logit_softcapping": "cap",
    "logits_soft_cap": "cap",
    "output_logit_soft_cap": "cap",
    "logit_scale": "factor",
    "lm_head_multiplier": "factor",
    "output_multiplier": "factor",
    "logits_scaling": "divisor",
    "logits_mup_width_multiplier": "divisor",
}
# Model types in which an attribute of that name does something else, or nothing.
EXCEPTIONS = {("hyperclovax", "logits_scaling"): "factor", ("mpt", "logit_scale"): None}

# Names of a transform of the logits, and of those which sound like one but act elsewhere.
SUSPICIOUS = re.compile(r"logit|soft_?cap|(head|output|final)\w*(scal|multiplier)")
ELSEWHERE = re.compile(r"attn|attention|rout|mlp|gate|init|aux|to_keep")

SET_BY_MODEL = ("shift", "reduction", "return_lse", "process_group", "vocab_range")
ROUTERS = "output_router_logits"


@dataclass
class _State:
    """What `use_fused_loss` leaves on the instance."""

    options: dict[str, object]
    logits_in_eval: bool
    previous: Callable | None  # a forward that the instance had of its own


def use_fused_loss(
    model: PreTrainedModel, *, logits_in_eval: bool = True, check: bool = True, **options: object
) -> PreTrainedModel:
    """Let this instance compute its training loss with `linear_cross_entropy`; returns the model.

    Calling it again replaces the options; `remove_fused_loss` restores the stock forward.

    Args:
        model: a causal language model with a base model, a plain linear head, and transformers' causal loss.
        logits_in_eval: False to have the fused loss, and no logits, in evaluation mode too.
        check: compare, on a forward pass of eight tokens, the model's logits with those that the loss assumes. It is
            left out by itself where the weights are not there to compute with (meta device, sharded).
        options: keywords of `linear_cross_entropy`. softcap and logit_scale, if given, replace what the config says.

    Raises:
        TypeError: not such a model, or an option that is unknown or belongs to the model.
        ValueError: a config attribute that seems to transform the logits and is not known, or logits that differ.
    """
    for name in SET_BY_MODEL:
        if name in options:
            raise TypeError(f"{name} follows from the model and its batch; leave it out of use_fused_loss")
    LinearCrossEntropyLoss(**options)
    _check_model(model)
    given = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
    full = {**logit_transform(model.config, known=given), **options}
    remove_fused_loss(model)
    if check and _computable(model):
        _check_logits(model, full)
    model._fused_loss = _State(full, logits_in_eval, model.__dict__.get("forward"))
    model.forward = _forward_of(type(model)).__get__(model)
    return model


def remove_fused_loss(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the forward that the instance had before, if it has a fused loss; returns the model."""
    state = model.__dict__.pop("_fused_loss", None)
    if state is not None:
        del model.forward
        if state.previous is not None:
            model.forward = state.previous
    return model


def logit_transform(config: object, known: dict[str, object] | None = None) -> dict[str, object]:
    """softcap and logit_scale of a config, as keywords of the loss; `known` ones are taken as they are.

    ValueError for an attribute that looks like a transform of the logits and is none of `TRANSFORMS`, unless both
    keywords are known.
    """
    text = config.get_text_config()
    found: dict[str, object] = {"softcap": None, "logit_scale": 1.0}
    for name, value in text.to_dict().items():
        kind = EXCEPTIONS.get((text.model_type, name), TRANSFORMS.get(name))
        if value is None or value is False or ((text.model_type, name) in EXCEPTIONS and kind is None):
            continue
        if kind == "cap":
            found["softcap"] = float(value)
        elif kind is not None:
            found["logit_scale"] *= value if kind == "factor" else 1 / value
        elif SUSPICIOUS.search(name) and not ELSEWHERE.search(name) and len(known or {}) < 2:
            raise ValueError(
                f"{text.model_type} has {name}={value!r}, which may transform the logits in a way that the fused loss "
                "does not know; pass softcap= and logit_scale= as the model applies them (None and 1.0 for none)"
            )
    return {**found, **(known or {})}


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{type(model).__name__} is not a model of transformers; unwrap it first: model.get_base_model() for an "
            "adapter, model.module for data parallel"
        )
    if not isinstance(model.get_output_embeddings(), nn.Module) or model.base_model is model:
        raise TypeError(
            f"{type(model).__name__} has no language-model head on a base model; use a ...ForCausalLM class"
        )
    if model.loss_function is not ForCausalLMLoss:
        raise TypeError(f"{type(model).__name__} has a loss of its own, not the causal one of transformers; keep it")
    _head(model)


def _head(model: PreTrainedModel) -> nn.Linear:
    """The output embedding, looked up at each call since wrappers replace it."""
    head = model.get_output_embeddings()
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        raise TypeError(
            f"the head is a {type(head).__name__}, not a plain nn.Linear: its adapter or quantization would be left "
            "out; keep the head plain, or call remove_fused_loss(model)"
        )
    if hasattr(head.weight, "ds_id"):
        raise TypeError(
            "the head is partitioned (ZeRO 3) and is not gathered outside its own forward; use ZeRO 2 or FSDP"
        )
    return head


def _computable(model: PreTrainedModel) -> bool:
    return not any(p.is_meta or hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in model.parameters())


@torch.no_grad()
def _check_logits(model: PreTrainedModel, options: dict[str, object]) -> None:
    """Compare the stock logits of eight tokens with those that the loss would use."""
    modes = [(module, module.training) for module in model.modules()]
    seen: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    try:
        # Evaluation mode: dropout would move the random numbers of a run.
        model.eval()
        embedding = model.get_input_embeddings().weight
        ids = torch.linspace(0, embedding.shape[0] - 1, 8, device=embedding.device).long()[None]
        logits = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        hook.remove()
        for module, training in modes:
            module.training = training
    weight, bias = _weights(model, options["logit_scale"])
    hidden = seen[-1].to(weight.device)
    ours = dense_logits(hidden, weight, bias, options["softcap"], options["logit_scale"]).to(logits.device)
    # A few roundings apart at most, relative to the largest logit.
    bound = 32 * torch.finfo(weight.dtype).eps * logits.abs().max()
    if ours.shape != logits.shape or not ((ours - logits).abs() <= bound).all():
        raise ValueError(
            f"the logits of {type(model).__name__} are not those of its head with softcap={options['softcap']} and "
            f"logit_scale={options['logit_scale']:g}; pass both as the model applies them, or keep the stock loss"
        )


def _weights(model: PreTrainedModel, scale: float) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the head, gathered if sharded. Models scale the bias too; the loss adds it after the scale."""
    head = _head(model)
    weight, bias = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (head.weight, head.bias))
    return weight, bias if bias is None or scale == 1.0 else bias * scale


@functools.cache
def _forward_of(cls: type[PreTrainedModel]) -> Callable:
    """The fused forward with the signature of a class, from which the Trainer reads what the model accepts."""
    names = [name for name in inspect.signature(cls.forward).parameters if name != "self"]

    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
        kwargs.update(zip(names, args, strict=False))
        skip = kwargs.pop("skip_logits", None)
        if _is_fused(self, kwargs, skip):
            return _fused(self, **kwargs)
        previous = self._fused_loss.previous
        return previous(**kwargs) if previous is not None else cls.forward(self, **kwargs)

    return forward


def _is_fused(model: PreTrainedModel, kwargs: dict[str, object], skip_logits: bool | None) -> bool:
    kept = kwargs.get("logits_to_keep", 0)
    if kwargs.get("labels") is None or isinstance(kept, Tensor) or kept:
        return False
    if kwargs.get(ROUTERS) or (kwargs.get(ROUTERS) is None and getattr(model.config.get_text_config(), ROUTERS, False)):
        _warn_routers(type(model).__name__)
        return False
    return (model.training or not model._fused_loss.logits_in_eval) if skip_logits is None else skip_logits


@functools.cache
def _warn_routers(name: str) -> None:
    log.warning("%s is asked for router logits, whose loss the stock forward adds: the fused loss is not used", name)


def _fused(
    model: PreTrainedModel,
    labels: Tensor,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int | None = None,
    return_dict: bool | None = None,
    logits_to_keep: int = 0,
    **kwargs: object,
) -> CausalLMOutputWithPast | tuple:
    options = dict(model._fused_loss.options)
    if ignore_index is not None:
        options["ignore_index"] = ignore_index
    outputs = model.base_model(**kwargs, return_dict=True)
    weight, bias = _weights(model, options["logit_scale"])
    hidden = outputs[0].to(weight.device)
    loss = linear_cross_entropy(
        hidden,
        weight,
        (labels if shift_labels is None else shift_labels).to(weight.device),
        bias=bias,
        shift=1 if shift_labels is None else 0,
        reduction="mean" if num_items_in_batch is None else "sum",
        **options,
    )
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    result = CausalLMOutputWithPast(
        loss=loss,
        past_key_values=getattr(outputs, "past_key_values", None),
        hidden_states=getattr(outputs, "hidden_states", None),
        attentions=getattr(outputs, "attentions", None),
    )
    as_dict = model.config.return_dict if return_dict is None else return_dict
    return result if as_dict else result.to_tuple()
