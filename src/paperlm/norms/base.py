"""How a normalization method wires and initializes a block of a transformer.

Every method of the two normalization papers is an instance of one equation. For block l = 1..L and each of
its two sub-layers f (attention, then feed-forward):

    out = N_out( r * x  +  s * N_post( f( c * N_pre(x) ) ) )

A method says which of the three norms exist and what r, s and c are; it also gives the standard deviation of
every weight matrix at initialization. A method that is no instance of the equation brings modules of its own
(`residuals`); one that treats the embedding's output, or has several residual streams, says how they begin and end
(`entry`, `exit`). This module is free of torch: the specification layer loads it to check a paper file before any job
starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from paperlm.errors import SpecError, unknown

ATTENTION_TENSORS = ("q", "k", "v", "o")
FFN_TENSORS = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A trained factor: its start value, and whether it is one number or one per feature."""

    init: float
    per_feature: bool = True
    shared: bool = False
    "True: attention and feed-forward of a block use the same parameter."


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The constants of the equation above, for one block."""

    pre: bool = False
    post: bool = False
    out: bool = False
    pre_scale: float = 1.0
    "c, a constant"
    residual_scale: float | Learned = 1.0
    "r"
    branch_scale: float | Learned = 1.0
    "s"


PRE = Wiring(pre=True)
POST = Wiring(out=True)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a method may look at when it chooses constants. `n_layers` is the depth the model was trained with."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    initializer_range: float = 0.02
    embed_init_std: float = 0.02


@dataclass(frozen=True, kw_only=True)
class NormMethod:
    """Base of every method. A subclass overrides `wiring`, and `init_std` or `block_norm` where it differs."""

    name: ClassVar[str]
    source: ClassVar[str]
    "where the method is defined: paper and equation"

    def check(self, shape: ModelShape) -> None:
        """Raise SpecError if the method cannot be built at this depth or width."""

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        """Wiring of block `layer`, counted from 1 at the embedding."""
        raise SpecError(f"norm method {self.name!r} defines no wiring; implement wiring(layer, shape)")

    def init_std(self, tensor: str, layer: int, shape: ModelShape) -> float:
        """Standard deviation of a weight matrix; `tensor` is one of q k v o gate up down (layer >= 1) or
        'embed', 'head' (layer 0). An image classifier has no gate; its class token and positions are 'embed'."""
        return shape.embed_init_std if tensor == "embed" else shape.initializer_range

    def embed_multiplier(self, shape: ModelShape) -> float:
        """Factor on the embedding output."""
        return 1.0

    def block_norm(self, hidden_size: int, eps: float) -> Any:
        """The norm module used inside blocks: norm(x), x (B, S, D); None: the model's own, RMSNorm in the decoder and
        LayerNorm in the image classifier, as the final norm always is.

        That of a method with `leaks_future` is also called as norm(x, real), real (B, S) being True at tokens that are
        no padding: statistics over the sequence are those of such tokens alone.
        """
        return None

    def residuals(self, layer: int, shape: ModelShape, norm: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Modules in the equation's place, for attention and feed-forward of block `layer`; None: those of `wiring`.

        Each has the methods of paperlm.models.layers.Residual; norm() makes a norm of the model's width. The state
        (B, S, n*D) that they pass on holds n residual streams side by side, if `entry` made them.
        """
        return None

    def entry(self, shape: ModelShape, norm: Callable[[], Any]) -> Any:
        """Module from the embedding's output (B, S, D) to the state (B, S, n*D) of the first block; None: as it is."""
        return None

    def exit(self, shape: ModelShape, norm: Callable[[], Any]) -> Any:
        """Module from the last block's state (B, S, n*D) to what the final norm reads, (B, S, D); None: as it is."""
        return None

    @property
    def in_equation(self) -> bool:
        """Whether `wiring` says all there is about a block."""
        return type(self).residuals is NormMethod.residuals

    def initialize_from_batch(self, model: Any, input_ids: Any) -> None:
        """Hook for methods whose initialization needs one forward pass over a training batch."""

    @property
    def leaks_future(self) -> bool:
        """True if a token's output depends on later tokens; such numbers are labelled wherever they appear."""
        return False

    def describe(self) -> dict[str, Any]:
        """Name and every option, as plain JSON values: what a run identifier hashes."""
        options: dict[str, Any] = {"name": self.name}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            options[field.name] = value.describe() if isinstance(value, NormMethod) else value
        return options


@dataclass(frozen=True, kw_only=True)
class WrappedMethod(NormMethod):
    """A method that changes the initialization of another one and keeps its wiring."""

    base: NormMethod

    def check(self, shape: ModelShape) -> None:
        self.base.check(shape)

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return self.base.wiring(layer, shape)

    def init_std(self, tensor: str, layer: int, shape: ModelShape) -> float:
        return self.base.init_std(tensor, layer, shape)

    def embed_multiplier(self, shape: ModelShape) -> float:
        return self.base.embed_multiplier(shape)

    def block_norm(self, hidden_size: int, eps: float) -> Any:
        return self.base.block_norm(hidden_size, eps)

    def residuals(self, layer: int, shape: ModelShape, norm: Callable[[], Any]) -> tuple[Any, Any] | None:
        return self.base.residuals(layer, shape, norm)

    def entry(self, shape: ModelShape, norm: Callable[[], Any]) -> Any:
        return self.base.entry(shape, norm)

    def exit(self, shape: ModelShape, norm: Callable[[], Any]) -> Any:
        return self.base.exit(shape, norm)

    @property
    def in_equation(self) -> bool:
        return type(self).residuals is WrappedMethod.residuals and self.base.in_equation

    def initialize_from_batch(self, model: Any, input_ids: Any) -> None:
        self.base.initialize_from_batch(model, input_ids)

    @property
    def leaks_future(self) -> bool:
        return self.base.leaks_future


def check_choice(method: str, option: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise SpecError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise SpecError(f"norm method {method!r}: " + unknown(option, value, allowed))


def xavier_normal_std(gain: float, tensor: str, shape: ModelShape) -> float:
    """Standard deviation of Xavier-normal: gain * sqrt(2 / (fan_in + fan_out))."""
    other = shape.intermediate_size if tensor in FFN_TENSORS else shape.hidden_size
    return gain * (2.0 / (shape.hidden_size + other)) ** 0.5
