"""Compressed checkpoints: a safetensors file in which stored weights stand as the bytes of their containers.

Every other tensor is there as it is, so that the file is as small as the model in memory, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path

import torch
from torch import Tensor, nn

from paperlm_kernels.neuzip.safetensors_file import PACKED_MODEL
from paperlm_kernels.stored.layers import stored_weights
from paperlm_kernels.stored.stores import PackedStore, RowBlocks, WeightStore

FORMAT, VERSION = PACKED_MODEL, "2"
"In the file's metadata, with `packed:<parameter>` -> sizes for each weight that is a container, and a SHA-256 of all."


def save_packed(model: nn.Module, path: str | Path) -> None:
    """Write a converted model's parameters and persistent buffers to one safetensors file.

    Of weights in a PackedStore (or RowBlocks of them) the containers, each `<parameter>.<block>`. Tied parameters stand
    there once, under their first name. A model that is saved twice gives the same bytes. What is at `path` stays until
    the new file is complete. Raises ValueError for a model without packed weights, and for a name that two tensors
    would have.
    """
    from safetensors.torch import save_file

    from paperlm_kernels.neuzip.part_files import replacing
    from paperlm_kernels.neuzip.safetensors_file import sort_metadata

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
            if name in tensors:
                raise ValueError(f"{name} is called as a block of a packed weight is: rename the module that has it")
            tensors[name] = tensor.detach().cpu().contiguous()
            seen.add(id(tensor))
    metadata["sha256"] = _digest(metadata, tensors, tensors.__getitem__)
    with replacing(Path(path)) as part:
        save_file(tensors, part, metadata=metadata)
        sort_metadata(part)


def read_packed(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and plain values of each tensor of a file that `save_packed` wrote, one decoded at a time.

    `model.load_state_dict(dict(read_packed(path)), strict=False)` loads a plain model or a converted one; strict is for
    models without tied weights, which stand in the file once. Raises ValueError for a file that is no such one, or is
    damaged: it is compared with its SHA-256 before the first.
    """
    from safetensors import SafetensorError, safe_open

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
        _refuse_header(path)
        try:
            digest = _digest({k: v for k, v in metadata.items() if k != "sha256"}, names, file.get_tensor)
        except SafetensorError as error:
            raise ValueError(f"{path}: a tensor cannot be read ({error}); save the model again") from None
        if metadata.get("sha256") != digest:
            raise ValueError(f"{path}: damaged, its content has another SHA-256; save the model again")
        packed = _packed_names(path, metadata, names)
        for name, (parts, shape) in packed.items():
            yield name, _unpacked(path, name, ((part, file.get_tensor(part)) for part in parts), shape)
        for name in sorted(names.difference(*(parts for parts, _ in packed.values()))):
            yield name, file.get_tensor(name)


def _refuse_header(path: str | Path) -> None:
    """ValueError for what safetensors passes over: a name that is there twice, of which it reads one, and sizes beyond
    what PyTorch counts, of which it raises a TypeError."""
    from paperlm_kernels.neuzip.safetensors_file import elements, read_json

    with Path(path).open("rb") as file:
        header = file.read(struct.unpack("<Q", file.read(8))[0])
    try:
        for name, described in read_json(header.decode()).items():
            elements(described["shape"] if name != "__metadata__" else ())
    except ValueError as reason:
        raise ValueError(f"{path}: the header is damaged ({reason}); save the model again") from reason


def _packed_names(
    path: str | Path, metadata: Mapping[str, str], names: Set[str]
) -> dict[str, tuple[list[str], tuple[int, ...]]]:
    """Of each weight that is packed, the names of its containers and its sizes, from metadata."""
    found = {}
    for key, described in metadata.items():
        if not key.startswith("packed:"):
            continue
        name = key.removeprefix("packed:")
        count, shape = _described(path, name, described)
        if name in names:
            raise ValueError(f"{path}: {name} is there both packed and plain; save the model again")
        # before a list of as many names as somebody may have written there
        if count > len(names):
            raise ValueError(f"{path}: {name} has {count} blocks, the file {len(names)} tensors; save the model again")
        parts = [f"{name}.{index}" for index in range(count)]
        if missing := [part for part in parts if part not in names]:
            raise ValueError(f"{path}: {missing[0]} is missing; save the model again")
        found[name] = parts, shape
    return found


def _unpacked(path: str | Path, name: str, blocks: Iterable[tuple[str, Tensor]], shape: tuple[int, ...]) -> Tensor:
    """A weight of the bytes of its containers, each with its name."""
    from paperlm_kernels.neuzip import ContainerError, from_bytes
    from paperlm_kernels.neuzip.safetensors_file import elements

    found = []
    for part, data in blocks:
        if data.dtype != torch.uint8:
            raise ValueError(f"{path}: {part} is of {data.dtype}, not the bytes of a container; save the model again")
        try:
            found.append(from_bytes(data.numpy().tobytes()).unpack().view(-1))
        except ContainerError as reason:
            raise ValueError(f"{path}: {part} is no container ({reason}); save the model again") from reason
    if len({values.dtype for values in found}) > 1:
        raise ValueError(f"{path}: blocks of {name} are of several dtypes; save the model again")
    values = found[0] if len(found) == 1 else torch.cat(found)
    if values.numel() != elements(shape):
        raise ValueError(f"{path}: {name} holds {values.numel()} values, its sizes are {shape}; save the model again")
    return values.view(shape)


def _digest(metadata: Mapping[str, str], names: Iterable[str], tensor: Callable[[str], Tensor]) -> str:
    """SHA-256 of metadata and of every tensor with its name, dtype and sizes."""
    found = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(names):
        values = tensor(name)
        found.update(f"{name} {values.dtype} {list(values.shape)}".encode())
        found.update(values.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _described(path: str | Path, name: str, text: str) -> tuple[int, tuple[int, ...]]:
    """Blocks and sizes of a container, from metadata, in digits alone: `int` takes 1_0, +1 and digits of any script."""
    from paperlm_kernels.neuzip.safetensors_file import elements

    try:
        if not re.fullmatch("[1-9][0-9]{0,18} [0-9]{1,19}(x[0-9]{1,19})*", text):
            raise ValueError("no number of blocks and sizes")
        count, sizes = text.split()
        shape = tuple(map(int, sizes.split("x")))
        elements(shape)
    except ValueError as reason:
        raise ValueError(
            f"{path}: sizes of {name} are {reprlib.repr(text)} ({reason}); the file is damaged, save the model again"
        ) from reason
    return int(count), shape


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
