"""Huffman streams as DFloat11's kernel reads them, made at once where its package takes one symbol at a time.

The bits of all symbols follow each other, the highest first. A thread reads 8 bytes: a gap of 5 bits says where in
them the first symbol begins that does so. A block of 512 threads is told how many symbols begin before it.
Source: `decode_hook` and `encode` of dfloat11 0.5.0, whose bytes are these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

THREAD_BYTES = 8
THREADS = 512
PART = 2**24
"Symbols that are coded at once: each takes some dozens of bytes meanwhile."


@dataclasses.dataclass(frozen=True)
class Streams:
    """encoded and gaps uint8, these from the highest bit on; positions int32 (blocks + 1,), ending with the number."""

    encoded: Tensor
    gaps: Tensor
    positions: Tensor

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.encoded, self.gaps, self.positions))


def streams(symbols: Tensor, codes: Mapping[int, tuple[int, int]], end: tuple[int, int]) -> Streams:
    """The streams of uint8 symbols, on their device.

    Args:
        symbols: (n,), n at least 1.
        codes: symbol -> its bits (1 to 32) and its code word.
        end: the same of the symbol that fills the last byte.
    """
    device, sizes, words_of = symbols.device, torch.zeros(256, dtype=torch.int64), torch.zeros(256, dtype=torch.int64)
    for symbol, (size, word) in codes.items():
        sizes[symbol], words_of[symbol] = size, word
    sizes, words_of = sizes.to(device), words_of.to(device)
    total = sum(int(sizes[part.int()].sum()) for part in symbols.split(PART))
    words = torch.zeros(total // 32 + 2, dtype=torch.int64, device=device)
    per_thread = 8 * THREAD_BYTES
    gaps, firsts, begin, count = [], [], 0, 0
    thread = torch.full((1,), -1, dtype=torch.int64, device=device)
    for part in symbols.split(PART):
        size, word = sizes[part.int()], words_of[part.int()]
        at = torch.cumsum(size, 0) - size + begin
        used = (at & 31) + size
        high = torch.where(used <= 32, word << (32 - used).clamp(min=0), word >> (used - 32).clamp(min=0))
        low = torch.where(used > 32, word << (64 - used).clamp(max=31), 0) & 0xFFFFFFFF
        words.index_add_(0, at >> 5, high).index_add_(0, (at >> 5) + 1, low)
        threads = torch.cat([thread, at // per_thread])
        new = threads[1:] != threads[:-1]
        gaps.append(at[new] % per_thread)
        firsts.append(
            (threads[1:] // THREADS != torch.div(threads[:-1], THREADS, rounding_mode="floor")).nonzero().view(-1)
            + count
        )
        thread, begin, count = threads[-1:], begin + int(size.sum()), count + len(part)
    if free := -total % 8:
        if total // per_thread != int(thread):
            gaps.append(torch.tensor([total % per_thread], device=device))
        if total // per_thread // THREADS != int(thread) // THREADS:
            firsts.append(torch.tensor([count], device=device))
        size, word = end
        words[total >> 5] += (word >> (size - free) if size >= free else word << (free - size)) << (
            32 - (total & 31) - free
        )
    length = -(-total // 8)
    encoded = words.view(torch.uint8).view(-1, 8)[:, [3, 2, 1, 0]].reshape(-1)[:length].clone()
    starts = torch.cat(gaps)
    padded = torch.zeros(-(-length // (THREADS * THREAD_BYTES)) * THREADS, dtype=torch.int64, device=device)
    padded[: len(starts)] = starts
    bits = (padded[:, None] >> torch.arange(4, -1, -1, device=device)) & 1  # 512 threads' gaps end with a byte
    packed = (bits.view(-1, 8) << torch.arange(7, -1, -1, device=device)).sum(1).to(torch.uint8)
    positions = torch.cat([*firsts, torch.tensor([count], device=device)]).to(torch.int32)
    return Streams(encoded, packed, positions)
