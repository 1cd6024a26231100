"""A trained model from elsewhere, as the folder that every other job on a model reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from paperlm.data.model_files import ModelData, model_files
from paperlm.data.registry import ModelEntry, model_entry, registry
from paperlm.errors import JobError, SpecError
from paperlm.files import link_or_copy
from paperlm.jobs.base import Head, Inputs, Job, Machine
from paperlm.result import Result


class HubModel(Job):
    """Weights and tokenizer of a model of the data registry, read as the architecture that its entry declares."""

    kind: ClassVar[str] = "hub_model"
    summary: ClassVar[str] = "reads a trained model from elsewhere and saves it as other jobs take it"
    on_card: ClassVar[bool] = False
    leaves_model: ClassVar[bool] = True

    name: str = Field(pattern=r"^(bundled|local|hub):[\w./-]+$")
    "`bundled:`, `local:` or `hub:` and a name under `models` in the data registry"

    @field_validator("name")
    @classmethod
    def model_exists(cls, value: str) -> str:
        return ModelData(model=value).model

    @property
    def norm(self) -> dict[str, str] | None:
        """How its blocks are normalized, as other models say it; None where the registry does not."""
        _, entry = model_entry(self.name)
        return {"name": entry.norm} if entry.norm else None

    def data(self) -> list[Any]:
        return [] if self.never() else [ModelData(model=self.name)]

    def never(self) -> str:
        return model_entry(self.name)[1].unreadable

    def weight_count(self) -> int | None:
        """By the registry."""
        size = model_entry(self.name)[1].size
        return size.parameters if size else None

    def metrics(self) -> tuple[str, ...]:
        return ("parameters", "blocks")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {}

    def lacks(self, head: Head) -> str:
        """By the registry."""
        _, entry = model_entry(self.name)
        if entry.predicts == head:
            return ""
        if entry.without_tokenizer:
            return f"{self.name} is here without its tokenizer: no text can be given to it, its weights alone be read"
        does = {
            "tokens": "predicts no next token",
            "spans": "marks no span of a text as an answer",
            "answers": "is no encoder with a decoder, which answers one text by another",
        }[head]
        entries = registry().models.items()
        fit = sorted(f"{other.source}:{name}" for name, other in entries if other.predicts == head)
        return f"{self.name} is a {entry.architecture}, which {does}; models that do: {', '.join(fit)}"

    def slug(self) -> str:
        name, _ = model_entry(self.name)
        return name.rpartition("/")[2].lower()


def run(job: HubModel, inputs: Inputs, machine: Machine) -> Result:
    """Read, check and save the model; metrics: parameters, blocks (of encoder and decoder). Weights in the GGUF format
    become float32. Of several files, which a model of 70B has, none is read into memory where it need not be.

    `blocked` for a model that the registry says is not to be read. Raises DataError for an altered file, JobError for
    another architecture than the declared one and for weights that are missing or left over. Code that comes with a
    model is never run.
    """
    from paperlm.models.folder import save_model
    from paperlm.probe.blocks import anatomy

    _, entry = model_entry(job.name)
    if why := job.never():
        return Result(outcome="blocked", reason=why)
    files = model_files(inputs.data[0])
    model = link_model(entry, files[0].parent, inputs.model)
    if model is None:
        model, tokenizer = read_model(entry, files)
        save_model(inputs.model, model, tokenizer)
    both = getattr(model.config, "is_encoder_decoder", False)
    metrics = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocks": model.config.num_layers + model.config.num_decoder_layers if both else len(anatomy(model).blocks),
    }
    return Result(outcome="measured", metrics=metrics, labels=entry.labels, model_labels=entry.labels)


def link_model(entry: ModelEntry, folder: Path, target: Path) -> Any | None:
    """Give `target` the weights of `folder` as they are, file by file, and its configuration and tokenizer; returns the
    model without its weights.

    None where they have to be read: a single file, or weights that are not those of the entry's architecture, a decoder
    of transformers, under its names and in the dtype of its configuration.
    """
    import transformers

    from paperlm.models.shell import SHARDED, WHOLE, shell_of

    if (folder / WHOLE).is_file() or not (folder / SHARDED).is_file():
        return None
    with _readable(entry, folder):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    shell = shell_of(folder, config.dtype) if config.dtype else None
    if shell is None or not shell.as_stored or type(shell.model).__name__ != entry.architecture:
        return None
    with _readable(entry, folder):
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(target)
    shell.model.config.save_pretrained(target)
    others = [path for name in (SHARDED, "generation_config.json") if (path := folder / name).is_file()]
    for path in (*others, *sorted({path for path, _ in shell.files.values()})):
        link_or_copy(path, target / path.name)
    return shell.model


@contextlib.contextmanager
def _readable(entry: ModelEntry, folder: Path) -> Iterator[None]:
    """What transformers says of files that it cannot read, with the folder in front of it."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SpecError) as error:
        raise JobError(f"{folder}: transformers cannot read it as {entry.architecture} ({error})") from None


def read_model(entry: ModelEntry, files: list[Path]) -> tuple[Any, Any]:
    """Model and tokenizer (None: there is none) of an entry, of its files in one folder."""
    import torch
    import transformers

    from paperlm.models import bitnet_checkpoint, llama, llama2c

    folder = files[0].parent
    if entry.architecture == llama2c.ARCHITECTURE:
        return llama2c.read_checkpoint(files[0]), None
    if entry.architecture == bitnet_checkpoint.ARCHITECTURE:
        return bitnet_checkpoint.read_checkpoint(folder)
    packed = [path.name for path in files if path.suffix == ".gguf"]
    gguf = {"gguf_file": packed[0]} if packed else {}
    weights: dict[str, Any] = {"dtype": "auto"}
    if gguf:
        weights = {"dtype": torch.float32, "quantization_config": transformers.GgufConfig(dequantize=True), **gguf}
    cls = getattr(transformers, entry.architecture, getattr(llama, entry.architecture, None))
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise JobError(f"{folder}: the registry declares architecture {entry.architecture!r}, unknown to transformers")
    with _readable(entry, folder):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, **gguf)
        names = config.architectures or [entry.architecture]
        if not isinstance(config, cls.config_class) or names != [entry.architecture]:
            raise JobError(
                f"{folder}: the files hold a {names[0]} ({config.model_type}), the registry declares "
                f"{entry.architecture}; correct the entry, or the files"
            )
        model, info = cls.from_pretrained(folder, output_loading_info=True, **weights)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **gguf)
    unused = [k for k in info["unexpected_keys"] if not any(fnmatchcase(k, p) for p in entry.unused_weights)]
    wrong = [*sorted(info["missing_keys"]), *sorted(unused), *sorted(map(str, info["mismatched_keys"]))]
    if wrong:
        raise JobError(f"{folder}: weights do not fit {entry.architecture}: {', '.join(wrong[:4])}")
    return model.eval(), tokenizer
