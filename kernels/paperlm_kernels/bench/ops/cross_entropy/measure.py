"""The parts of the loss that are measured, as in Table 1 of Cut Cross-Entropy.

Loss: the forward pass with gradients enabled. Gradient: the backward pass alone. Loss and gradient: both, with
`.grad` cleared before, so that the gradients' own memory is inside. The memory of the gradient is that above what the
forward pass has left.
"""

from __future__ import annotations

import time

import torch

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.clocks import Step
from paperlm_kernels.bench.ops.cross_entropy.data import Inputs
from paperlm_kernels.bench.ops.cross_entropy.methods import Contender

L2_BYTES = 256 * 2**20
PARTS = ("loss", "gradient", "both")


def step(contender: Contender, inputs: Inputs, measure: str) -> Step:
    """What is prepared and what is measured of PARTS, or both_cold. The inputs become leaves that require gradients."""
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()

    def clear() -> None:
        hidden.grad = weight.grad = None

    def forward() -> torch.Tensor:
        return contender.loss(hidden, weight, inputs.target)

    def prepare_gradient() -> torch.Tensor:
        clear()
        return forward()

    def prepare_cold() -> None:
        clear()
        torch.empty(L2_BYTES, dtype=torch.uint8, device=hidden.device).zero_()

    steps = {
        "loss": Step(clear, lambda _: forward()),
        "gradient": Step(prepare_gradient, lambda loss: loss.backward()),
        "both": Step(clear, lambda _: forward().backward()),
        "both_cold": Step(prepare_cold, lambda _: forward().backward()),
    }
    return steps[measure]


def cpu_times(
    contender: Contender, inputs: Inputs, *, repeats: int, warmup: int, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of each repetition of each of PARTS. A CPU has finished what a call returns from, so that one
    repetition of both gives all three."""
    parts = step(contender, inputs, "gradient")
    found: dict[str, list[float]] = {name: [] for name in PARTS}

    def once() -> tuple[float, float, float]:
        inputs.hidden.grad = inputs.weight.grad = None
        begin = time.perf_counter()
        loss = parts.prepare()
        between = time.perf_counter()
        parts.run(loss)
        end = time.perf_counter()
        return (between - begin) * 1e3, (end - between) * 1e3, (end - begin) * 1e3

    for _ in range(max(1, warmup)):
        elapsed = once()[2] / 1e3
    for _ in range(clocks.repetitions(elapsed, repeats=repeats, seconds=seconds)):
        for name, taken in zip(PARTS, once(), strict=True):
            found[name].append(taken)
    return found
