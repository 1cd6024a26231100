"""Every quantizer a second time, as its formula in float64 with numpy: x (..., width) -> x_q."""

import math

import numpy as np

EPS = 1e-5


def absmax(levels):
    def values(x):
        gamma = np.maximum(np.abs(x).max(-1, keepdims=True), EPS)
        return gamma * np.clip(np.rint(levels * x / gamma), -levels - 1, levels) / levels

    return values


def absmean(multiple):
    def values(x):
        beta = np.maximum(multiple * np.abs(x).mean(-1, keepdims=True), EPS)
        return beta * np.clip(np.rint(math.sqrt(7) * x / beta), -8, 7) / math.sqrt(7)

    return values


def minifloat(exponent, mantissa):
    def values(x):
        bias = np.log2((2 - 2.0**-mantissa) / np.maximum(np.abs(x).max(-1, keepdims=True), EPS)) + 2**exponent - 1
        with np.errstate(divide="ignore"):
            # The largest of a row has a whole exponent, which the logarithm may miss by its last bit.
            e = np.maximum(np.floor(np.log2(np.abs(x)) + bias + 1e-12), 1)
        step = 2.0 ** (e - bias - mantissa)
        return step * np.rint(x / step)

    return values


def ternary(w):
    alpha = max(np.abs(w).mean(), EPS)
    return alpha * np.clip(np.rint(w / alpha), -1, 1)


def symmetric(bits):
    def values(x):
        s = np.maximum(np.abs(x).max(-1, keepdims=True), EPS) / (2 ** (bits - 1) - 1)
        return s * np.clip(np.rint(x / s), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    return values


def minmax(bits):
    def values(x):
        gamma = np.maximum(np.abs(x).max(-1, keepdims=True), EPS)
        s = 2 * gamma / (2**bits - 1)
        # (x + gamma) / s, so written that zero, half-way between two codes, is so exactly.
        return s * np.rint(x / s + (2**bits - 1) / 2) - gamma

    return values


ORACLES = [
    ("ternary_absmean", {}, ternary),
    ("int8_absmax", {}, absmax(127)),
    ("int4_absmax", {}, absmax(7)),
    ("int4_absmean", {}, absmean(1)),
    ("int4_absmean", {"multiple": 2}, absmean(2)),
    ("fp4_e2m1", {}, minifloat(2, 1)),
    ("fp4_e1m2", {}, minifloat(1, 2)),
    ("kv_symmetric", {"bits": 4}, symmetric(4)),
    ("kv_symmetric", {"bits": 3}, symmetric(3)),
    ("kv_minmax", {"bits": 4}, minmax(4)),
    ("kv_minmax", {"bits": 3}, minmax(3)),
]
"Name, options, formula."
