"""The fused loss inside one instance of a causal language model of transformers.

    model = use_fused_loss(AutoModelForCausalLM.from_pretrained(...), filter_grads="hidden")

Only this instance changes: its options are an attribute of it, and its class becomes a subclass of the same name whose
forward reads them, so that copies, replicas of nn.DataParallel and pickles compute with their own weights. What the
loss has to know about the model's logits (cap, scale, bias) comes from its config and head, and is compared with the
logits of the stock forward pass before anything is replaced, since a transform that is missed would train another
model without any sign of it.

| call                                                  | forward pass                                              |
|-------------------------------------------------------|-----------------------------------------------------------|
| training mode, with labels                            | fused loss, `logits=None`                                 |
| evaluation mode, with labels                          | stock, with logits for metrics; fused if the call has     |
|                                                       | skip_logits=True or the instance logits_in_eval=False     |
| without labels (generation), or skip_logits=False     | stock                                                     |
| router logits asked for                               | stock, which adds their loss; logged once                 |

`num_items_in_batch`, `shift_labels` and `ignore_index` mean what they mean to the stock loss, so the Trainer of
transformers works unchanged. The trainers of trl 1.16 have a fused head of their own and never ask the model for a
loss: a warning is logged where one puts its forward in place of this one. `paperlm_kernels.trainers.ModelLoss` lets
SFTTrainer ask.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from paperlm_kernels.cross_entropy.dense import dense_logits
from paperlm_kernels.cross_entropy.function import LinearCrossEntropyLoss, linear_cross_entropy
from paperlm_kernels.trainers import ASKED

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
# Rows of the head at a time, and the largest logit, in the comparison with the stock logits. At 100 the caps in use
# (15 to 50) have an effect, whatever the size of the model's own logits.
CHECK_ROWS, CHECK_LOGIT = 8192, 100.0


OWN_UNIT = (
    "the head's weight is in an FSDP unit that is not gathered when the loss is computed, and its gradient would not "
    "be averaged over the ranks; keep the head in the root unit: do not fully_shard lm_head by itself, nor the "
    "embedding that it is tied to, but only the layers and then the whole model"
)


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

    softcap and logit_scale are read now: a config that is changed later needs another call.
    """
    for name in SET_BY_MODEL:
        if name in options:
            raise TypeError(f"{name} follows from the model and its batch; leave it out of use_fused_loss")
    LinearCrossEntropyLoss(**options)
    _check_model(model)
    given = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
    full = {**logit_transform(model.config, known=given), **options}
    if check and _computable(model):
        _check_logits(model, full)
    state = model.__dict__.get("_fused_loss")
    previous = model.__dict__.pop("forward", None) if state is None else state.previous
    model._fused_loss = _State(full, logits_in_eval, previous)
    if not hasattr(type(model), "_stock_class"):
        model.__class__ = _fused_class(type(model))
    return model


def remove_fused_loss(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the forward that the instance had before, if it has a fused loss; returns the model."""
    state = model.__dict__.pop("_fused_loss", None)
    if state is not None:
        model.__dict__.pop("forward", None)  # what others have wrapped around the fused one since
        if state.previous is not None:
            model.forward = state.previous
        if "_stock_class" in vars(type(model)):  # else FSDP has made a subclass of it, which is stock without a state
            model.__class__ = type(model)._stock_class
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
            "the head is partitioned (ZeRO 3) and is not gathered outside its own forward; use ZeRO 2, or FSDP with "
            "the head in the root unit"
        )
    if isinstance(head, FSDPModule):
        raise TypeError(OWN_UNIT)
    return head


def _computable(model: PreTrainedModel) -> bool:
    return not any(p.is_meta or hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in model.parameters())


@torch.no_grad()
def _check_logits(model: PreTrainedModel, options: dict[str, object]) -> None:
    """Compare the stock logits of eight tokens with those that the loss would use, as they are and scaled up."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        # Evaluation mode: dropout would move the random numbers of a run.
        model.eval()
        same = all(_same_logits(model, options, largest) for largest in (None, CHECK_LOGIT))
    finally:
        for module, training in modes:
            module.training = training
    if not same:
        raise ValueError(
            f"the logits of {type(model).__name__} are not those of its head with softcap={options['softcap']} and "
            f"logit_scale={options['logit_scale']:g}; pass both as the model applies them, or keep the stock loss"
        )


def _same_logits(model: PreTrainedModel, options: dict[str, object], largest: float | None) -> bool:
    """Whether they are the same but for the roundings of the stock ones.

    With `largest`, the hidden states of the base model are multiplied by a number that makes it the largest logit
    before the cap. The expected logits have float32 products of the 16-bit values: what is left then are the few
    roundings of the stock logits, each of up to eps / 2 of an element.
    """
    weight, bias = _weights(model, options["logit_scale"])
    expected: list[Tensor] = []

    def expect(module: nn.Module, args: object, output: object) -> None:
        hidden = output[0]
        if largest is not None:
            size = _exact_logits(hidden, weight, bias, None, options["logit_scale"]).abs().max()
            room = torch.finfo(hidden.dtype).max / 16 / hidden.abs().max()
            hidden.mul_(torch.minimum(largest / size, room.to(size)).clamp(max=1e4).to(hidden))
        expected.append(_exact_logits(hidden, weight, bias, options["softcap"], options["logit_scale"]))

    hook = model.base_model.register_forward_hook(expect)
    try:
        embedding = model.get_input_embeddings().weight
        ids = torch.linspace(0, embedding.shape[0] - 1, 8, device=embedding.device).long()[None]
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    eps = max(torch.finfo(weight.dtype).eps, torch.finfo(logits.dtype).eps)
    # Sums in another order are a few roundings of float32 apart, too.
    each, together = (4 * eps, 2 * eps) if eps > 1e-4 else (32 * eps, 32 * eps)
    right = expected[-1]
    if logits.shape != right.shape:
        return False
    error = logits.to(right) - right
    return bool(error.abs().max() <= each * right.abs().max()) and bool(error.norm() <= together * right.norm())


def _exact_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float) -> Tensor:
    """The logits, of float32 products at least, with a copy of a few rows of the head at a time."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    hidden = hidden.to(weight.device, dtype)
    biases = itertools.repeat(None) if bias is None else bias.to(dtype).split(CHECK_ROWS)
    rows = zip(weight.split(CHECK_ROWS), biases, strict=False)
    return torch.cat([dense_logits(hidden, w.to(dtype), b, softcap, scale) for w, b in rows], -1)


def _weights(model: PreTrainedModel, scale: float) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the head, gathered if sharded. Models scale the bias too; the loss adds it after the scale."""
    head = _head(model)
    if hasattr(head.weight, "full_tensor"):
        # The gradient of a gathered tensor is that of tensor parallelism: the same on every rank.
        units = (module for module in model.modules() if isinstance(module, FSDPModule) and module is not model)
        if any(parameter is head.weight for unit in units for parameter in unit.parameters()):
            raise TypeError(OWN_UNIT)
    weight, bias = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (head.weight, head.bias))
    return weight, bias if bias is None or scale == 1.0 else bias * scale


@functools.cache
def _fused_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass with the fused forward, and with the name by which checkpoints know the class."""
    return type(
        cls.__name__,
        (cls,),
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce,
            "_stock_class": cls,
            "__setattr__": _set_attribute,
            "forward": _forward_of(cls),
        },
    )


def _set_attribute(model: PreTrainedModel, name: str, value: object) -> None:
    """nn.Module's, with a word where a trainer of trl replaces the forward pass by one that computes its own loss."""
    code = getattr(getattr(value, "__func__", value), "__code__", None) if name == "forward" else None
    if code is not None and "fused_lm_head" in code.co_varnames and "_fused_loss" in vars(model) and not ASKED.get():
        log.warning(
            "trl computes the loss with a fused head of its own: use_fused_loss has no effect in its trainers; for "
            "SFTTrainer, put paperlm_kernels.trainers.ModelLoss in front of it"
        )
    PreTrainedModel.__setattr__(model, name, value)


def _reduce(model: PreTrainedModel, protocol: int) -> tuple:
    """Pickles and copies name the stock class, as the fused one cannot be imported."""
    stock = nn.Module.__reduce_ex__(model, protocol)
    return (_empty, (type(model)._stock_class,), *stock[2:]) if "_stock_class" in vars(type(model)) else stock


def _empty(cls: type[PreTrainedModel]) -> PreTrainedModel:
    fused = _fused_class(cls)
    return fused.__new__(fused)


def _forward_of(cls: type[PreTrainedModel]) -> Callable:
    """The fused forward with the signature of a class, from which the Trainer reads what the model accepts."""
    signature = inspect.signature(cls.forward)
    names = [name for name in signature.parameters if name != "self"]

    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
        kwargs.update(zip(names, args, strict=False))
        skip = kwargs.pop("skip_logits", None)
        state = getattr(self, "_fused_loss", None)
        if state is not None and _is_fused(self, kwargs, skip):
            return _fused(self, **kwargs)
        previous = None if state is None else state.previous
        # A pickle names a method and not its function: the method that comes back is this one.
        if previous is None or getattr(previous, "__func__", None) is forward:
            return cls.forward(self, **kwargs)
        return previous(**kwargs)

    # Wrappers that unwrap themselves, as accelerate's, must not go on to the stock forward.
    del forward.__wrapped__
    forward.__signature__ = signature
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
