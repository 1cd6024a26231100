"""Public checkpoints of BitNet b1.58 (1bitLLM/bitnet_b1_58-*) as models of the decoder: latent weights, other names.

They come with code of their own, which is not run: what their configuration says is checked, weights are renamed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from paperlm.errors import JobError, SpecError
from paperlm.quantizers.presets import PRESETS

ARCHITECTURE = "BitnetForCausalLM"
"What such a checkpoint names in `architectures`."

BITS = {"input_bits": 8, "weight_bits": 1}
"What its layers do, by its configuration's keys: INT8 by the largest magnitude of a token, ternary weights."

NAMES = {
    r"\.self_attn\.inner_attn_ln\.": ".attention.sub_norm.",
    r"\.mlp\.ffn_layernorm\.": ".mlp.sub_norm.",
    r"\.self_attn\.": ".attention.",
    r"\.input_layernorm\.": ".attention_residual.pre_norm.",
    r"\.post_attention_layernorm\.": ".mlp_residual.pre_norm.",
}
"Pattern in a weight's name -> its part here; the first that fits."

IGNORED = ("rotary_emb.inv_freq",)
"Ends of names that hold what follows from the configuration."

OTHERS = {"architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
"Keys that say nothing about what is computed."


def read_checkpoint(folder: Path) -> tuple[Any, Any]:
    """Model in evaluation mode, in the dtype of its weights, and tokenizer of a folder.

    Raises JobError for another architecture, a configuration that the decoder does not have, packed weights, and
    weights that are missing or left over.
    """
    from paperlm.models.llama import PaperLlamaForCausalLM

    state = _weights(folder)
    try:
        config = _config(folder)
        if config.tie_word_embeddings:
            _drop_tied_head(state, folder)
        model, info = PaperLlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=state, dtype=state["model.embed_tokens.weight"].dtype,
            output_loading_info=True,
        )  # fmt: skip
    except (SpecError, RuntimeError, KeyError, ValueError, OSError) as error:
        raise JobError(f"{folder}: no checkpoint of BitNet b1.58 that the decoder can be ({error})") from None
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])})
    if wrong:
        raise JobError(f"{folder}: weights do not fit {ARCHITECTURE}: {', '.join(wrong[:4])}")
    return model.eval(), _tokenizer(folder)


def _config(folder: Path) -> Any:
    from paperlm.models.llama import PaperLlamaConfig

    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(described, dict):
        raise JobError(f"{folder}: config.json holds a {type(described).__name__}, not a model's settings by name")
    names = described.get("architectures")
    if names != [ARCHITECTURE]:
        raise JobError(f"{folder}: the files hold a {(names or ['model'])[0]}, the registry declares {ARCHITECTURE}")
    for key, bits in BITS.items():
        if described.get(key) != bits:
            raise JobError(f"{folder}: {key} is {described.get(key)!r}; {bits} is what BitNet b1.58 has, and is read")
    rest = {key: value for key, value in described.items() if key not in OTHERS and key not in BITS}
    return PaperLlamaConfig(**rest, sub_norm=True, quantization=PRESETS["b158"]["quantization"])


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            state |= {_renamed(name): weight for name, weight in load_file(path).items() if not name.endswith(IGNORED)}
    except SafetensorError as error:
        raise JobError(f"{path}: no weights that safetensors can read ({error})") from None
    packed = [name for name, weight in state.items() if not weight.is_floating_point()]
    if packed:
        raise JobError(
            f"{folder}: {packed[0]} is {state[packed[0]].dtype}: packed weights of another layout; this reads latent "
            "ones, whose scale is mean|W|: take the checkpoint that is for training"
        )
    return state


def _renamed(name: str) -> str:
    for pattern, part in NAMES.items():
        if re.search(pattern, name):
            return re.sub(pattern, part, name)
    return name


def _drop_tied_head(state: dict[str, Any], folder: Path) -> None:
    head = state.pop("lm_head.weight", None)
    if head is not None and not head.equal(state["model.embed_tokens.weight"]):
        raise JobError(f"{folder}: lm_head.weight is not the embedding, though tie_word_embeddings says so")


def _tokenizer(folder: Path) -> Any:
    import transformers

    # The folder names a class of its own code; the file of the tokenizers library has all that it does.
    fast = (folder / "tokenizer.json").is_file()
    cls = transformers.PreTrainedTokenizerFast if fast else transformers.LlamaTokenizer
    try:
        return cls.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise JobError(f"{folder}: no tokenizer that transformers can read ({error})") from None
