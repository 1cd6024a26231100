"""Documents packed into chunks that each begin with a BOS, as perplexity is measured for BitNet. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from paperlm.errors import DataError

Longer = Literal["drop", "split"]
"What becomes of a document that does not fit into a chunk: it is left out, or cut into pieces that do."


@dataclass
class Chunks:
    """Chunks of token ids in the order of the documents, and what they are made of."""

    ids: list[list[int]] = field(default_factory=list)
    documents: int = 0
    longer: int = 0
    "documents that did not fit into a chunk"


def packed_chunks(documents: Iterable[list[int]], length: int, bos: int, longer: Longer) -> Chunks:
    """Greedy packing: a document, which ends with its EOS, goes behind the one before it while the chunk has room.

    Each chunk begins with `bos` and has at most `length` ids; one that a document does not fit into is closed, and
    the document opens the next. A document that does not fit behind the BOS of an empty chunk is left out or cut
    (`longer`). Raises DataError if nothing is left.
    """
    found, chunk, room = Chunks(), [bos], length - 1
    for ids in documents:
        found.documents += 1
        found.longer += len(ids) > room
        if len(ids) > room and longer == "drop":
            continue
        for piece in (ids[start : start + room] for start in range(0, len(ids), room)):
            if len(chunk) + len(piece) > length:
                found.ids.append(chunk)
                chunk = [bos]
            chunk = [*chunk, *piece]
    if len(chunk) > 1:
        found.ids.append(chunk)
    if not found.ids:
        raise DataError(
            f"none of {found.documents} documents fits into a chunk of {length} tokens: raise chunk, or set longer: "
            "split"
        )
    return found
