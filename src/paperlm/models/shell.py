"""A model without its weights, and the weights of its folder, which are read one at a time.

For models that are larger than the memory they would be read into, and small enough once each weight is stored.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paperlm.errors import SpecError

WHOLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
"The file of all weights, or else that which says in which file each lies."
PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"Types of numbers that are weights as they are; of others it takes more to know what they mean."


@dataclass(frozen=True)
class Shell:
    """A model in evaluation mode, its parameters on the meta device and its buffers on the CPU, and where its weights
    lie. `files`: each name of a parameter -> file, and the name that it has there. dtype: of all parameters. as_stored:
    whether all of them have it in their files too."""

    model: Any
    files: dict[str, tuple[Path, str]]
    dtype: torch.dtype
    as_stored: bool

    def read(self, name: str, device: Any) -> Tensor:
        """A parameter's values, in the dtype that it has in the model."""
        from safetensors import safe_open

        path, stored = self.files[name]
        with safe_open(path, framework="pt") as file:
            found = file.get_tensor(stored)  # mapped into memory, not read yet
            return torch.empty(found.shape, dtype=self.dtype, device=device).copy_(found)

    def fill(self, device: Any) -> None:
        """Read the parameters that are on the meta device still; tied ones stay tied."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for prefix, module in self.model.named_modules():
            for role, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if parameter not in made:
                    values = self.read(f"{prefix}.{role}".lstrip("."), device)
                    made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[role] = made[parameter]


def shell_of(folder: Path, dtype: torch.dtype) -> Shell | None:
    """The decoder of a folder. None where its weights are not those of the model under the model's names, each once, in
    safetensors and in one dtype: `load_model` then reads it, or says what is wrong."""
    import transformers

    import paperlm.models.llama  # noqa: F401 - makes the Auto classes know the decoder

    if not (found := _found(Path(folder))):
        return None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            return None
        with parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except (OSError, ValueError, RuntimeError, SpecError):
        return None
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    files, used = {}, set()
    for parameter, names in aliases.items():
        there = [name for name in names if name in found]
        if len(there) != 1 or found[there[0]][1] != tuple(parameter.shape) or parameter.dtype != dtype:
            return None
        used.add(there[0])
        files |= {name: (found[there[0]][0], there[0]) for name in names}
    in_float32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if used != found.keys() or any(part in name for part in in_float32 for name in used):
        return None
    return Shell(model, files, dtype, all(stored == dtype for _, _, stored in found.values()))


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile get parameters without values; buffers, which no file may have, are computed."""
    register = nn.Module.register_parameter

    def without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is has been registered before: a tied one
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_values
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _found(folder: Path) -> dict[str, tuple[Path, tuple[int, ...], torch.dtype]]:
    """Name -> file, shape and dtype of each tensor; empty: not all can be read here."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[Path, tuple[int, ...], torch.dtype]] = {}
    try:
        names = [WHOLE]
        if not (folder / WHOLE).is_file():
            names = sorted(set(json.loads((folder / SHARDED).read_text(encoding="utf-8"))["weight_map"].values()))
        for path in (folder / name for name in names):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dictionary
                    tensor = file.get_slice(name)
                    if tensor.get_dtype() not in PLAIN:
                        return {}
                    found[name] = path, tuple(tensor.get_shape()), PLAIN[tensor.get_dtype()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError):
        return {}
    return found
