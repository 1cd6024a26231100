"""An encoder-decoder in bitsandbytes' types, frozen, with peft's low-rank matrices beside its linear layers.

Dettmers et al., QLoRA, arXiv 2305.14314, with the settings of NeuZip's Table 2 (arXiv 2410.20650, section 4.2): rank 8,
alpha 8, no dropout, products in bfloat16. The second projections of T5's feed-forward stay in float32, as the authors'
program has them. Activations are recomputed, as in the table's other rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from paperlm_kernels.stored import model_hash

from paperlm.errors import JobError
from paperlm.train.language_model import recompute_activations

RANK = 8


def build(folder: Path, types: str, seed: int, device: torch.device) -> tuple[Any, int]:
    """The model with its adapter at update 0, and how many weights it has without. `types`: int8, fp4, nf4, and the two
    with `_double`, whose scales are quantized as well. Raises JobError for a folder that cannot be read so."""
    import peft
    import transformers

    kind, _, double = types.partition("_")
    if kind == "int8":
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=bool(double),
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    try:
        model = transformers.T5ForConditionalGeneration.from_pretrained(
            folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": device}, dropout_rate=0.0,
            local_files_only=True, use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise JobError(f"{folder}: no T5 that bitsandbytes can quantize ({error}); make the model again") from None
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    recompute_activations(model)
    torch.manual_seed(seed)
    adapter = peft.LoraConfig(
        r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules="all-linear", task_type="SEQ_2_SEQ_LM"
    )
    model = peft.get_peft_model(model, adapter).train()
    trainable, every = model.get_nb_trainable_parameters()
    return model, every - trainable


def trained(model: Any) -> torch.nn.Module:
    """The matrices that are trained, as a module of their own."""
    return torch.nn.ParameterDict(
        {name.replace(".", "/"): p for name, p in model.named_parameters() if p.requires_grad}
    )


def of_weights(model: Any) -> dict[str, float | int | None]:
    """Bytes of all weights with the scales of quantized ones, each once; those and the adapter's gradients; bits of a
    quantized weight, scales included; 48 bits of the hash of the adapter."""
    seen: dict[int, int] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and ".quant_state." not in name:  # its description, not its numbers
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    adapter = trained(model)
    total, gradients = sum(seen.values()), sum(p.numel() * p.element_size() for p in adapter.parameters())
    return {
        "weight_bytes": total,
        "state_bytes": total + gradients,
        "bits_per_weight": _bits(model),
        "weights_hash": int(model_hash(adapter)[:12], 16),
    }


def _bits(model: Any) -> float:
    size = weights = 0
    for module in model.modules():
        quantized = hasattr(module, "quant_state") or hasattr(getattr(module, "weight", None), "SCB")
        if not quantized or hasattr(module, "base_layer"):  # of peft, around the layer itself
            continue
        weights += module.in_features * module.out_features
        tensors = [t for name, t in module.state_dict().items() if name != "bias" and ".quant_state." not in name]
        size += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    return 8 * size / weights
