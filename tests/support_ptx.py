"""What the PTX of the FIX4 product on tensor cores does, in NumPy: so that its kernel runs in Triton's interpreter."""

from __future__ import annotations

import ctypes
import re

import numpy as np


def run_ptx(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Straight code on 32-bit registers, of all lanes at once; a branch over the rest is a mask. `$0`... are outputs,
    then inputs. KeyError for an instruction that is not known here."""
    regs = {f"${outputs + i}": value.astype(np.uint32) for i, value in enumerate(inputs)}
    live, predicate = np.ones(len(inputs[0]), bool), None
    ops = {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "add": lambda a, b: a + b, "sub": lambda a, b: a - b,
        "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "mul": lambda a, b: a * b, "prmt": _prmt, "lop3": _lop3,
    }  # fmt: skip
    for line in (part.strip() for part in re.split(r"[;\n]", text)):
        if line == "@!some bra DONE":
            live = live & predicate
        elif line and line[0] not in "{}." and not line.endswith(":"):
            name, operands = line.split(maxsplit=1)
            target, *given = operands.replace(" ", "").split(",")
            values = [regs[one] if one in regs else np.uint32(int(one, 0)) for one in given]
            if name.startswith("setp.ne"):
                predicate = values[0] != values[1]
                continue
            found = ops[name.partition(".")[0]](*values)
            regs[target] = np.where(live, found, regs.get(target, np.zeros_like(found)))
    return [regs[f"${i}"] for i in range(outputs)]


def _prmt(a, b, selector):
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(a)
    for i in range(4):
        byte = both >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & np.uint64(255)
        found |= byte.astype(np.uint32) << np.uint32(8 * i)
    return found


def _lop3(a, b, c, table):
    terms = [
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if int(table) >> i & 1
    ]
    return np.bitwise_or.reduce(np.broadcast_arrays(*terms))


def floats(word: np.ndarray, half: int) -> np.ndarray:
    """float32 of the lower (0) or higher bfloat16 of words."""
    return (word << np.uint32(16) if half == 0 else word & np.uint32(0xFFFF0000)).view(np.float32)


def mma(c: list[np.ndarray], a: list[np.ndarray], b: list[np.ndarray]) -> list[np.ndarray]:
    """mma.m16n8k16 of bfloat16 for each warp, by the fragments of the PTX manual: lane = 4 g + t has a0 in row g and a1
    in row g + 8 at k = 2 t and 2 t + 1, a2 and a3 eight further; b0, b1 the same k of column g; c0, c1 row g, c2, c3
    row g + 8, at columns 2 t and 2 t + 1."""
    found = [one.copy() for one in c]
    g, t = np.arange(32) // 4, np.arange(32) % 4
    for start in range(0, len(c[0]), 32):
        w = slice(start, start + 32)
        left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        for half in (0, 1):
            for i in range(4):
                left[g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = floats(a[i][w].view(np.uint32), half)
            for i in range(2):
                right[2 * t + half + 8 * i, g] = floats(b[i][w].view(np.uint32), half)
        product = left @ right
        for i in range(4):
            found[i][w] += product[g + 8 * (i // 2), 2 * t + i % 2]
    return found


def words_at(address: np.ndarray, there: np.ndarray) -> list[np.ndarray]:
    """Four words of 32 bits at each address, zeros for lanes that are not there."""
    rows = [ctypes.string_at(int(a), 16) if t else bytes(16) for a, t in zip(address, there, strict=True)]
    return list(np.frombuffer(b"".join(rows), np.int32).reshape(-1, 4).T.copy())
