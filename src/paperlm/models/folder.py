"""A model folder: weights as safetensors, configuration, tokenizer. What every job that works on a model reads.

The decoder's folders load in any tool of the field that uses transformers: where paperlm is imported as they are,
elsewhere with trust_remote_code=True, since a module in the folder names the classes. Other architectures (from a hub)
are read through the same calls. Here nothing in a folder is executed: `trust_remote_code` is never passed, weights are
safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import JobError, SpecError, unknown

MALFORMED = (ValueError, TypeError, LookupError, AttributeError)
"What JSON raises that is not of the form that a library reads it in."


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write weights, configuration and, if there is one, tokenizer (transformers' objects) into `folder`."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def transformers_tokenizer(name: str, trained_length: int) -> Any:
    """A tokenizer of the registry as transformers' PreTrainedTokenizerFast.

    It adds no token to a text (the registry's t5 file would append eos, which breaks prompts), pads on the right, and
    its `model_max_length` is the length that the model was trained with.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    text = TextTokenizer(name)
    inner = Tokenizer.from_str(text.inner.to_str())
    inner.post_processor = None
    entry = text.entry
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=entry.bos,
        eos_token=entry.eos,
        pad_token=entry.pad or entry.eos,
        model_max_length=trained_length,
        padding_side="right",
    )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises JobError if there is none."""
    from transformers import AutoTokenizer

    import paperlm.models.llama
    import paperlm.models.vit  # noqa: F401 - both make the Auto classes know their models

    _present(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise JobError(f"{folder}: no tokenizer that transformers can read ({error}); make the model again") from None


def load_model(folder: Path, head: str = "causal", **options: Any) -> Any:
    """The model of a folder in evaluation mode, on the CPU.

    `head`: causal, sequence (a score), image (classes), none, or own: the class that the folder's configuration names.
    `options` are from_pretrained's: dtype, attn_implementation. Raises JobError if it cannot be read, or if weights are
    missing or left over: a graph with fresh weights in it would be evaluated without a word. Without a head, that of
    the folder may be left over.
    """
    import transformers
    from safetensors import SafetensorError

    import paperlm.models.llama
    import paperlm.models.vit  # noqa: F401 - both make the Auto classes know their models

    classes = {
        "causal": transformers.AutoModelForCausalLM,
        "sequence": transformers.AutoModelForSequenceClassification,
        "image": transformers.AutoModelForImageClassification,
        "none": transformers.AutoModel,
    }
    if head not in (*classes, "own"):
        raise JobError(unknown("head", head, [*classes, "own"]))
    _present(folder)
    try:
        if head == "own":
            cls = architecture_class(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
        else:
            cls = classes[head]
        model, info = cls.from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are named below
            **options,
        )
    except (OSError, *MALFORMED, RuntimeError, SafetensorError, SpecError) as error:
        raise JobError(f"{folder}: no model that transformers can read ({error}); make it again") from None
    left_over = {key for key in info["unexpected_keys"] if head != "none" or not key.startswith(("lm_head.", "score."))}
    other = [f"{name} is {tuple(found)} and not {tuple(own)}" for name, found, own in sorted(info["mismatched_keys"])]
    wrong = sorted(info["missing_keys"]) + sorted(left_over) + other
    if wrong:
        raise JobError(f"{folder}: weights do not fit the model: {', '.join(wrong[:4])}; make the model again")
    return model.eval()


def model_with_cache(folder: Path, kv_cache: dict[str, Any] | None) -> Any:
    """As `load_model`, with queries, keys and values in so many bits; None: as the folder's configuration has them.

    Raises JobError for another architecture than this project's decoder.
    """
    import transformers

    import paperlm.models.llama  # noqa: F401 - makes the Auto classes know the decoder

    if kv_cache is None:
        return load_model(folder)
    _present(folder)
    if not hasattr(
        transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), "kv_cache"
    ):
        raise JobError(f"{folder}: kv_cache is of this project's decoder, and this is another architecture")
    return load_model(folder, kv_cache=kv_cache)


def architecture_class(config: Any) -> Any:
    """The class that a configuration names in `architectures`: of this project or of transformers.

    Raises JobError if it names none that is known.
    """
    import transformers

    from paperlm.models import llama, vit

    name = (config.architectures or ["none"])[0]
    found = next((found for module in (llama, vit, transformers) if (found := getattr(module, name, None))), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise JobError(f"the configuration names the architecture {name!r}, which neither transformers nor paperlm has")
    return found


def _present(folder: Path) -> None:
    """Raise JobError if there is no such folder: transformers would take its name for a repository of the hub."""
    if not Path(folder, "config.json").is_file():
        raise JobError(f"{folder}: no model folder; make the model first")
