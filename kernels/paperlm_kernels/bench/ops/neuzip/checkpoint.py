"""Weights of a trained model, from a file that is named on the command line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.neuzip.safetensors_file import SafetensorsFile

OUTSIDE = ("embed", "lm_head", "shared.", "wte.", "wpe.")
"In the names of embeddings and heads of transformers' models."


def weights_of(path: Path, count: int) -> Tensor:
    """The first `count` weights of a safetensors file's matrices in bfloat16, embeddings and head left out, in the
    order of the file, (count,). Raises ValueError where they are fewer."""
    file, found, have = SafetensorsFile(path), [], 0
    try:
        for entry in file.entries:
            if entry.dtype != "BF16" or len(entry.shape) != 2 or any(part in entry.name for part in OUTSIDE):
                continue
            found.append(file.tensor(entry).reshape(-1)[: count - have])
            have += len(found[-1])
            if have == count:
                return torch.cat(found)
    finally:
        file.close()
    raise ValueError(
        f"{path.name}: {have:,} weights in matrices of bfloat16 without embeddings and head; {count:,} are needed: "
        "name a larger checkpoint, in bfloat16"
    )


def digest(weights: Tensor) -> str:
    """Twelve digits of the sha256 of their bytes."""
    return hashlib.sha256(weights.view(torch.int16).numpy().astype(np.int16).tobytes()).hexdigest()[:12]
