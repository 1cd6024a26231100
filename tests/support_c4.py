"""The bundled corpus read without the package."""

import gzip
import hashlib
import json

from paperlm.data.registry import HERE

BUNDLED = HERE / "bundled/c4_sample.jsonl.gz"
BPE = HERE / "tokenizers/bpe1024/tokenizer.json"


def c4_texts(split: str) -> list[str]:
    """Texts of the bundled corpus: one text in ten, by its hash, is held out."""
    texts = [json.loads(line)["text"] for line in gzip.decompress(BUNDLED.read_bytes()).splitlines()]
    held_out = [int(hashlib.sha256(t.encode()).hexdigest(), 16) % 10 == 0 for t in texts]
    return [t for t, held in zip(texts, held_out, strict=True) if held == (split == "validation")]
