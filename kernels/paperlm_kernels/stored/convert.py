"""Put the weights of a model into stores, in place: `convert(model, PackedStore)`."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from paperlm_kernels.stored.layers import StoredConv1D, StoredEmbedding, StoredLayer, StoredLinear, stored_weights
from paperlm_kernels.stored.stores import RowBlocks, StoreFactory
from paperlm_kernels.stored.subclasses import changed_by_hand, further_attributes, why_left
from paperlm_kernels.stored.weight import StoredWeight

POLICIES = {
    "paper": "every linear layer but those with lm_head in their name or an embedding's weight; embeddings, norms and "
    "biases stay",
    "all_linear": "the head as well",
    "all": "embeddings as well, in blocks of rows",
}
"Which weights are stored."
SHOWN = 4
"Names that a line has at most."


@dataclass(frozen=True)
class Conversion:
    """What `convert` did."""

    names: tuple[str, ...]
    "parameters that are stored now, by the first of their names"
    weights: int
    "their values"
    bytes_before: int
    bytes_after: int
    parameters: int
    "values of the whole model"
    plain: dict[str, tuple[int, ...]] = field(hash=False)
    """parameters of two and more dimensions that stay plain, and their sizes: what the policy leaves, and what is no
    layer's, such as the experts of Mixtral, which are one parameter of three dimensions"""
    left: dict[str, str] = field(hash=False)
    "linear layers that the policy does not leave by their name and that stay plain, and why"

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a value, tables included."""
        return 8 * self.bytes_after / max(1, self.weights)

    @property
    def plain_share(self) -> float:
        """The part of the model's values that `plain` has, 0 to 1."""
        return sum(map(math.prod, self.plain.values())) / max(1, self.parameters)

    def __str__(self) -> str:
        """A line of what is stored, one of what is not, and one of layers that might have been."""
        lines = [f"stored: {len(self.names)} parameters, {self.weights:,} values, {self.bits_per_weight:.2f} bits each"]
        largest = sorted(self.plain, key=lambda name: -math.prod(self.plain[name]))
        shown = [f"{name} ({' x '.join(map(str, self.plain[name]))})" for name in largest]
        if shown:
            share = f"{len(shown)} parameters of two and more dimensions, {self.plain_share:.1%} of all values"
            lines.append(f"left plain: {share}: {_listed(shown)}")
        if self.left:
            lines.append(f"linear layers left: {_listed([f'{n} ({w})' for n, w in self.left.items()])}")
        return "\n".join(lines)


@torch.inference_mode(False)  # within inference_mode, parameters and stores could never be trained
def convert(
    model: nn.Module,
    store_factory: StoreFactory,
    policy: str = "paper",
    *,
    leave: Sequence[str] = (),
    keep_recomputed: bool = False,
    values: Callable[[str], torch.Tensor] | None = None,
) -> Conversion:
    """Replace layers of a model by ones whose weight lies in a store, one after the other; the values stay.

    Layers: nn.Linear, transformers' Conv1D, under `all` nn.Embedding, and subclasses of nn.Linear that a probe finds to
    compute the same up to rounding (`why_left`): Falcon's, whose stored layer rounds once where it rounded the product
    and the sum with the bias. Layers with one of `leave` in the name of their weight are left alone.

    Other parameters stay plain, such as the experts of Mixtral and DeepSeek, one of three dimensions for all experts:
    the result says which, and what share of the model. A layer is stored whether its parent calls it or not. One whose
    parent computes with `layer.weight` (Mamba's dt_proj, two of RWKV's) raises RuntimeError when it does: put it into
    `leave`.

    values: gives a weight by the first of its names when its turn comes, in place of the model's own value, so that a
    model on the meta device is stored without ever being there whole; what stays plain is then the caller's to load.

    Layers that share a weight share its store. keep_recomputed: see StoredWeight. Make the optimizer afterwards: the
    old parameters are emptied. Resize a vocabulary before: transformers' `resize_token_embeddings` finds no rows in a
    stored embedding, and raises ValueError.

    Where a store cannot be made (a value that is not finite in a store with loss, a dtype, memory), layers before it
    are stored, it and those behind it are as they were, and the model computes, unless `values` were to come: mend the
    weight, and convert the rest.

    Raises TypeError for a store that cannot be called and for `leave` that is one string, ValueError for a name in it
    that no weight has, an unknown policy, a model with nothing to store, one alias of a tied weight without the others,
    an embedding that changes its rows as it looks them up, `values` of another shape than the weight's, and a Conv1D
    for a store that `multiplies`; and what the store raises, with the weight's name in a note.
    """
    if not callable(store_factory):
        raise TypeError(
            f"the store {store_factory!r} is a {type(store_factory).__name__}; give PackedStore, or another that makes "
            "a store of a tensor, and the policy behind it"
        )
    _known(policy)
    owners, names = _holders(model, "_parameters"), _names(model)
    chosen, left = _chosen(names, policy, leave)
    if not chosen:
        if already := len(stored_weights(model)):
            raise ValueError(
                f"no layer to store under policy {policy!r}: {already} weights of the model are stored already"
            )
        found = f"; left: {_listed([f'{n} ({why})' for n, why in left.items()])}" if left else ""
        raise ValueError(
            f"no layer to store under policy {policy!r}: nn.Linear, Conv1D or nn.Embedding is looked for{found}"
        )
    for module in chosen:
        _check(module, names, owners, set(chosen), policy)
    made: dict[nn.Parameter, StoredWeight] = {}
    replaced: dict[nn.Module, StoredLayer] = {}
    places = _holders(model, "_modules")
    before, first = 0, []
    for module in chosen:
        parameter = module.weight
        if parameter not in made:
            sharing, weight_name = [owner for owner, _ in owners[parameter]], f"{names[module][0]}.weight".lstrip(".")
            try:
                given = _given(parameter, values, weight_name)
                made[parameter] = _stored(given, store_factory, sharing, keep_recomputed, names[module][0])
                made[parameter].handle.requires_grad_(parameter.requires_grad and made[parameter].store.trainable)
                del given  # or it would lie there beside the next one
            except Exception as error:
                error.add_note(
                    f"{weight_name} could not be stored; {len(first)} weights before it are, it and those behind it "
                    "are as they were"
                )
                raise
            before += parameter.nbytes
            first.append(weight_name)
        replaced[module] = _layer(module, made[parameter])
        if all(owner in replaced for owner, _ in owners[parameter]):
            for owner, _ in owners[parameter]:  # before their values go, so that a failure later loses none
                for parent, place in places[owner]:
                    parent._modules[place] = replaced[owner]
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    stores = [weight.store for weight in made.values()]
    sizes = sum(s.shape.numel() for s in stores)
    everything = {weight.handle: weight.store.shape for weight in stored_weights(model).values()}
    rest = {name: tuple(p.shape) for name, p in model.named_parameters() if p not in everything}
    return Conversion(
        names=tuple(first),
        weights=sizes,
        bytes_before=before,
        bytes_after=sum(s.nbytes for s in stores),
        parameters=sum(map(math.prod, [*everything.values(), *rest.values()])),
        plain={name: shape for name, shape in rest.items() if len(shape) > 1},
        left=left,
    )


def chosen_weights(model: nn.Module, policy: str = "paper", leave: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """Name -> weight of each layer that `convert` would store, tied ones once; nothing is converted. Raises
    TypeError and ValueError for a policy or `leave` as `convert` does."""
    _known(policy)
    found: dict[nn.Parameter, str] = {}
    names = _names(model)
    for module in _chosen(names, policy, leave)[0]:
        found.setdefault(module.weight, f"{names[module][0]}.weight".lstrip("."))
    return {name: parameter for parameter, name in found.items()}


def _known(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r}: there are {', '.join(POLICIES)}")


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Module -> all names that it has."""
    found = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        found[module].append(name)
    return dict(found)


def _check_leave(leave: Sequence[str], names: dict[nn.Module, list[str]]) -> None:
    if isinstance(leave, str):
        raise TypeError(f"leave={leave!r} is one name; give a list, leave=[{leave!r}]")
    weights = [f"{name}.weight" for module, known in names.items() if "weight" in module._parameters for name in known]
    for part in leave:
        if not any(part in weight for weight in weights):
            near = difflib.get_close_matches(part, {piece for weight in weights for piece in weight.split(".")}, 1)
            raise ValueError(
                f"leave: no weight has {part!r} in its name" + (f"; did you mean {near[0]!r}?" if near else "")
            )


def _holders(model: nn.Module, kind: str) -> dict[nn.Module | nn.Parameter, list[tuple[nn.Module, str]]]:
    """Parameter (`_parameters`) or module (`_modules`) -> the modules that have it, and as what."""
    found = defaultdict(list)
    for module in model.modules():
        for name, item in getattr(module, kind).items():
            if item is not None:
                found[item].append((module, name))
    return dict(found)


def _is_conv1d(module: nn.Module) -> bool:
    # by name, so that transformers is no dependency
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _chosen(
    names: dict[nn.Module, list[str]], policy: str, leave: Sequence[str]
) -> tuple[list[nn.Module], dict[str, str]]:
    """Layers to store, and name -> why not of those that the policy wants and that a probe does not know to be linear,
    or that are an embedding under another name, as BERT's and Whisper's heads are."""
    _check_leave(leave, names)
    embedded: set[nn.Parameter | None] = set()
    if policy == "paper":
        embedded = {module._parameters.get("weight") for module in names if isinstance(module, nn.Embedding)} - {None}
    chosen, left = [], {}
    for module, known in names.items():
        if not _is_wanted(module, known, policy, leave):
            continue
        if module._parameters.get("weight") in embedded:
            why = "its weight is an embedding's"
        elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            why = why_left(module)
        else:
            why = changed_by_hand(module)
        if why is None:
            chosen.append(module)
        else:
            left[known[0]] = why
    return chosen, left


def _is_wanted(module: nn.Module, names: list[str], policy: str, leave: Sequence[str]) -> bool:
    if any(part in f"{name}.weight" for name in names for part in leave):
        return False
    if isinstance(module, nn.Linear) or _is_conv1d(module):
        return policy != "paper" or not any("lm_head" in name for name in names)
    return policy == "all" and type(module) is nn.Embedding


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _check(
    module: nn.Module,
    names: dict[nn.Module, list[str]],
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]],
    chosen: set[nn.Module],
    policy: str,
) -> None:
    name = names[module][0] or "the model"
    if name == "the model":
        raise ValueError("the model is a single layer, which has no place to be replaced in: nn.Sequential(model)")
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or hasattr(module, "_hf_hook"):
        raise ValueError(f"{name} has hooks, which would be lost: remove them, or register them after convert()")
    if module.weight._backward_hooks or module.weight._post_accumulate_grad_hooks:
        raise ValueError(f"{name}.weight has hooks, which would be lost: remove them (an optimizer's: its close())")
    for owner, role in owners[module.weight]:
        if owner not in chosen or role != "weight":
            other = f"{names[owner][0]}.{role}".lstrip(".")
            raise ValueError(
                f"{name}.weight is tied to {other}, which policy {policy!r} leaves as it is: leave both "
                f"(leave=[{f'{name}.weight'!r}]){_all_of(policy, owner)}, or untie them first"
            )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise ValueError(f"{name}: max_norm and scale_grad_by_freq of an embedding are not supported; use 'all_linear'")


def _all_of(policy: str, owner: nn.Module) -> str:
    """Whether `all` would store the other one too."""
    return ", store both (policy 'all')" if policy != "all" and type(owner) is nn.Embedding else ""


def _given(parameter: nn.Parameter, values: Callable[[str], torch.Tensor] | None, name: str) -> torch.Tensor:
    if values is None:
        return parameter.detach()
    found = values(name).detach()
    if found.shape != parameter.shape:
        raise ValueError(f"values of shape {tuple(found.shape)} for {name} of {tuple(parameter.shape)}: give its own")
    return found


def _stored(
    values: torch.Tensor, factory: StoreFactory, owners: list[nn.Module], keep_recomputed: bool, layer: str
) -> StoredWeight:
    in_rows = any(isinstance(owner, nn.Embedding) for owner in owners)
    store = RowBlocks(values, factory) if in_rows else factory(values)
    if store.multiplies and any(map(_is_conv1d, owners)):
        raise ValueError(
            f"{type(store).__name__} multiplies by matrices (out, in); the model has a Conv1D, (in, out): use another"
        )
    return StoredWeight(store, keep_recomputed, layer)


def _layer(module: nn.Module, weight: StoredWeight) -> StoredLayer:
    if isinstance(module, nn.Embedding):
        made: StoredLayer = StoredEmbedding(weight, module.padding_idx)
    else:
        made = (StoredConv1D if _is_conv1d(module) else StoredLinear)(weight, module.bias)
    if type(module) is not nn.Linear and isinstance(module, nn.Linear):
        for name, value in further_attributes(module).items():
            made.__dict__.setdefault(name, value)  # what the model may ask its own layer for
    return made.train(module.training)
