"""A model folder: weights as safetensors, configuration, tokenizer. What every job that works on a model reads.

The decoder's folders load in any tool of the field; other architectures (from a hub) are read through the same calls.
Nothing in a folder is executed: `trust_remote_code` is never passed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import JobError


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write weights, configuration and tokenizer (transformers' objects) into `folder`."""
    model.save_pretrained(folder)
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
        eos_token=entry.eos,
        pad_token=entry.pad or entry.eos,
        model_max_length=trained_length,
        padding_side="right",
    )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises JobError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise JobError(f"{folder}: no tokenizer that transformers can read ({error}); make the model again") from None


def load_model(folder: Path, head: str = "causal", **options: Any) -> Any:
    """The model of a folder in evaluation mode, on the CPU.

    `head`: causal, sequence (a score), none, or own: the class that the folder's configuration names. Raises JobError
    if it cannot be read, or if weights are missing or left over: a graph with fresh weights in it would be evaluated
    without a word.
    """
    import transformers

    import paperlm.models.llama  # noqa: F401 - makes the Auto classes know the decoder

    classes = {
        "causal": transformers.AutoModelForCausalLM,
        "sequence": transformers.AutoModelForSequenceClassification,
        "none": transformers.AutoModel,
    }
    try:
        cls = architecture_class(transformers.AutoConfig.from_pretrained(folder)) if head == "own" else classes[head]
        model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
    except (OSError, ValueError) as error:
        raise JobError(f"{folder}: no model that transformers can read ({error}); make it again") from None
    wrong = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if wrong:
        raise JobError(f"{folder}: weights do not fit the model: {', '.join(wrong[:4])}; make the model again")
    return model.eval()


def architecture_class(config: Any) -> Any:
    """The class that a configuration names in `architectures`: of this project or of transformers.

    Raises JobError if it names none that is known.
    """
    import transformers

    from paperlm.models import llama

    name = (config.architectures or ["none"])[0]
    found = getattr(llama, name, None) or getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise JobError(f"the configuration names the architecture {name!r}, which neither transformers nor paperlm has")
    return found
