"""Weights that are published as a pickle alone, turned into safetensors without running what a pickle can run.

PyTorch's `weights_only` builds tensors, plain containers and numbers, and refuses everything else by its name.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from paperlm.errors import DataError
from paperlm.files import temporary_beside

if TYPE_CHECKING:
    from torch import Tensor

PATTERN = "pytorch_model*.bin"
"Files of weights as transformers saved them before it had safetensors: one, or shards with an index beside them."
INDEX = "pytorch_model.bin.index.json"


def to_safetensors(folder: Path) -> None:
    """Replaces a folder's files of PATTERN by safetensors of the same weights, and their index.

    A file is read whole at a time, through the memory of its pages where it is not in the format before PyTorch 1.6;
    weights that share memory there are stored once each. Raises DataError for a file that holds anything but named
    tensors, or is damaged; it stays as it is.
    """
    paths = sorted(folder.glob(PATTERN))
    places = {}
    for path in paths:
        weights = _read(path)
        target = path.with_name(path.name.replace("pytorch_model", "model", 1)).with_suffix(".safetensors")
        _write(weights, target)
        places |= dict.fromkeys(weights, target.name)
        path.unlink()
    index = folder / INDEX
    index.unlink(missing_ok=True)  # it names files that are gone
    if len(paths) > 1:
        text = json.dumps({"metadata": {}, "weight_map": places}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _read(path: Path) -> dict[str, Tensor]:
    import torch

    remedy = "it is not read: fetch it again, or use a copy as safetensors"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{path}: holds more than weights, or is damaged ({reason}); {remedy}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a {type(found).__name__}, not weights by name; {remedy}")
    for name, weight in found.items():
        if not isinstance(name, str) or not isinstance(weight, torch.Tensor):
            raise DataError(f"{path}: {name!r} is a {type(weight).__name__}, not a weight with a name; {remedy}")
    return found


def _write(weights: dict[str, Tensor], target: Path) -> None:
    from safetensors.torch import save_file

    apart, seen = {}, set()
    for name, weight in weights.items():
        shared = weight.untyped_storage().data_ptr()
        whole = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
        apart[name] = weight if whole and shared not in seen else weight.contiguous().clone()
        seen.add(shared)
    partial = temporary_beside(target)
    save_file(apart, partial, metadata={"format": "pt"})  # transformers asks for it
    partial.replace(target)
