"""Compressed checkpoints: a safetensors file in which stored weights stand as the bytes of their containers.

Every other tensor is there as it is, so that the file is as small as the model in memory, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from paperlm_kernels.stored.layers import stored_weights
from paperlm_kernels.stored.stores import PackedStore, RowBlocks, WeightStore

FORMAT, VERSION = "paperlm_packed", "2"
"In the file's metadata, with `packed:<parameter>` -> sizes for each weight that is a container, and a SHA-256 of all."


def save_packed(model: nn.Module, path: str | Path) -> None:
    """Write a converted model's parameters and persistent buffers to one safetensors file.

    Of weights in a PackedStore (or RowBlocks of them) the containers, each `<parameter>` or `<parameter>.<block>`. Tied
    parameters stand there once, under their first name. Raises ValueError for a model without packed weights.
    """
    from safetensors.torch import save_file

    tensors, metadata = {}, {"format": "pt", "container": FORMAT, "container_version": VERSION}
    handles = set()
    for name, weight in stored_weights(model).items():
        blocks = _packed_blocks(weight.store)
        if not blocks:
            tensors[name] = weight.store.read().cpu().contiguous()
        for index, block in enumerate(blocks):
            tensors[f"{name}.{index}"] = torch.frombuffer(bytearray(block.packed.to_bytes()), dtype=torch.uint8)
        if blocks:
            metadata[f"packed:{name}"] = f"{len(blocks)} {'x'.join(map(str, weight.store.shape))}"
        handles.add(id(weight.handle))
    if not any(key.startswith("packed:") for key in metadata):
        raise ValueError("no weight of the model is packed: convert(model, PackedStore) first, or save it as it is")
    seen = set()
    for name, tensor in [*model.named_parameters(), *_buffers(model)]:
        if id(tensor) not in handles | seen:
            tensors[name] = tensor.detach().cpu().contiguous()
            seen.add(id(tensor))
    metadata["sha256"] = _digest(metadata, tensors, tensors.__getitem__)
    save_file(tensors, path, metadata=metadata)


def read_packed(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and plain values of each tensor of a file that `save_packed` wrote, one decoded at a time.

    `model.load_state_dict(dict(read_packed(path)), strict=False)` loads a plain model or a converted one; strict is for
    models without tied weights, which stand in the file once. Raises ValueError for a file that is no such one, or is
    damaged: it is compared with its SHA-256 before the first.
    """
    from safetensors import SafetensorError, safe_open

    from paperlm_kernels.neuzip import from_bytes

    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: truncated or no safetensors file ({error}); save the model again") from None
    with file:
        metadata, names = file.metadata() or {}, set(file.keys())
        if (metadata.get("container"), metadata.get("container_version")) != (FORMAT, VERSION):
            raise ValueError(f"{path}: not written by save_packed (version {VERSION}); load it as a plain checkpoint")
        if metadata.pop("sha256", None) != _digest(metadata, names, file.get_tensor):
            raise ValueError(f"{path}: damaged, its content has another SHA-256; save the model again")
        for key, described in metadata.items():
            if not key.startswith("packed:"):
                continue
            name = key.removeprefix("packed:")
            count, shape = _described(path, name, described)
            parts = [f"{name}.{index}" for index in range(count)]
            if missing := [part for part in parts if part not in names]:
                raise ValueError(f"{path}: {missing[0]} is missing; save the model again")
            blocks = [from_bytes(file.get_tensor(part).numpy().tobytes()).unpack() for part in parts]
            values = blocks[0] if count == 1 else torch.cat(blocks)
            if values.numel() != torch.Size(shape).numel():
                raise ValueError(f"{path}: {name} holds {values.numel()} values, its sizes are {shape}; save it again")
            names -= set(parts)
            yield name, values.view(shape)
        for name in sorted(names):
            yield name, file.get_tensor(name)


def _digest(metadata: Mapping[str, str], names: Iterable[str], tensor: Callable[[str], Tensor]) -> str:
    """SHA-256 of metadata and of every tensor with its name, dtype and sizes."""
    found = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(names):
        values = tensor(name)
        found.update(f"{name} {values.dtype} {list(values.shape)}".encode())
        found.update(values.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _described(path: str | Path, name: str, text: str) -> tuple[int, tuple[int, ...]]:
    """Blocks and sizes of a container, from metadata."""
    try:
        count, sizes = text.split()
        found = int(count), tuple(map(int, sizes.split("x")))
    except ValueError:
        found = 0, ()
    if found[0] < 1 or min(found[1], default=-1) < 0:
        raise ValueError(f"{path}: sizes of {name} are {text!r}; the file is damaged, save the model again")
    return found


def _packed_blocks(store: WeightStore) -> list[PackedStore]:
    """Containers of a store; none if it has others."""
    blocks = store.blocks if isinstance(store, RowBlocks) else [store]
    return blocks if all(isinstance(block, PackedStore) for block in blocks) else []


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that a state dict has."""
    for prefix, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), tensor
