"""Bytes that the loss over a large vocabulary cannot do without, from its shapes.

N tokens, vocabulary V, width D; `element` is the size of an element of the inputs. Table 1 of Cut Cross-Entropy:
its lower bound of 1161 MB is (8192 + 256000) x 2304 x 2 bytes in mebibytes.
"""

from __future__ import annotations


def gradient_bytes(tokens: int, vocab: int, width: int, element: int = 2) -> int:
    """Both gradients, (N + V) D elements: what the backward pass has to allocate whatever it does."""
    return (tokens + vocab) * width * element


def loss_bytes() -> int:
    """The mean loss, one float32."""
    return 4
