"""The registry of texts, images and tokenizers (registry.yaml) and of sets of items (items.yaml). Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from paperlm.errors import DataError, SpecError, unknown
from paperlm.frozen import Frozen, digest
from paperlm.load import load

HERE = Path(__file__).parent


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; where it is not known, say so in words")
    return text


Said = Annotated[str, AfterValidator(_said)]
"Words that somebody has to have written."


class About(Frozen):
    """What is needed to trust and cite anything that the registry names, whichever kind of thing it is."""

    summary: Said
    revision: Said
    "which version of it; where no source has the commit, what is known instead"
    licence: Said
    citation: Said


class FileEntry(Frozen):
    """One file: path below the package's data folder, or below the `local_data` folder."""

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(gt=0)


class Shuffle(Frozen):
    """Streaming shuffle of a hub split."""

    seed: int
    buffer: int


class HubEntry(Frozen):
    """A Hugging Face dataset: `name` on the hub (or a local folder in the hub's layout)."""

    name: str
    config: str | None
    revision: str
    shuffle: dict[str, Shuffle] = {}


class Part(Frozen):
    """A piece of a split of the source, under a name that jobs ask for."""

    of: str
    skip: int = Field(0, ge=0)
    first: int | None = Field(None, gt=0)
    "so many items from there on; None: all"


class ImageFormat(Frozen):
    """What is known of every image of a set."""

    classes: int = Field(gt=1)
    shape: tuple[int, int, Literal[1, 3]] | None = None
    "height, width and channels of bundled and local images; a hub's may differ in theirs"


class DatasetEntry(About):
    """A text corpus, a set of items or a set of images, and everything needed to trust and cite it."""

    source: Literal["bundled", "local", "hub"]
    documents: int | None = None
    fields: list[str] = []
    "of a set of items: what each of them has; empty for the other two"
    columns: dict[str, str] = {}
    """of a set of items: field -> where the source has it, keys within keys joined by dots; a field that is not named
    here has its own name there"""
    images: ImageFormat | None = None
    "of a set of images alone"
    splits: list[str] = []
    "of a hub's set of items: the splits it has; the other sources name them in `files`"
    parts: dict[str, Part] = {}
    "of a set of items: split -> what it is made of, where the source has no split of that name or a larger one"
    files: dict[str, list[FileEntry]] = {}
    hub: HubEntry | None = None
    validation_share: int | None = Field(None, gt=1)
    "one document in so many, chosen by the hash of its text, is validation; None: there is a validation split"
    text_field: str = "text"
    "of a text: what its lines or rows call a document"
    held_out: str = "validation"
    "of a hub's text: the split that is read as validation"
    deviations: list[str] = []

    @model_validator(mode="after")
    def complete(self) -> DatasetEntry:
        if (self.source == "hub") != (self.hub is not None) or (self.source == "hub") == bool(self.files):
            raise ValueError("a hub dataset has `hub`, the others have `files`")
        of_a_text = {name: type(self).model_fields[name].default for name in ("text_field", "held_out")}
        if (self.images or self.fields) and any(getattr(self, name) != usual for name, usual in of_a_text.items()):
            raise ValueError("text_field and held_out are of a text")
        if strange := set(self.columns) - set(self.fields):
            raise ValueError(f"columns: {', '.join(sorted(strange))} is none of the set's `fields`")
        if self.images:
            if self.fields or self.splits or self.parts or self.validation_share:
                raise ValueError("a set of images has the splits train and validation, and no `fields`")
            if (self.images.shape is None) != (self.source == "hub"):
                raise ValueError("images: `shape` is that of bundled and local images, and of no others")
            if self.files and (
                set(self.files) != {"train", "validation"} or {len(f) for f in self.files.values()} != {2}
            ):
                raise ValueError("a set of images has two files for train and for validation: a PNG and its labels")
            return self
        if self.fields:
            if bool(self.splits) != (self.source == "hub"):
                raise ValueError("a hub's set of items names its `splits`, the others name them in `files`")
            if strange := {part.of for part in self.parts.values()} - set(self.splits or self.files):
                raise ValueError(f"parts: the source has no split {', '.join(sorted(strange))}")
            return self
        if self.splits or self.parts or not set(self.files) <= {"train", "validation"}:
            raise ValueError("a text has the splits train and validation; a set of items needs `fields`")
        if self.files and (self.validation_share is None) == ("validation" not in self.files):
            raise ValueError("give either files.validation or validation_share")
        return self

    @property
    def trains(self) -> bool:
        """Of a text: whether it has documents to train on."""
        return self.source == "hub" or "train" in self.files

    @property
    def form(self) -> str:
        """What it is, for messages."""
        return "a set of images" if self.images else "a set of items" if self.fields else "a text"


class TokenizerEntry(About):
    """A tokenizers-library file, the ids training needs, and everything needed to trust and cite it."""

    file: FileEntry
    vocab_size: int
    "rows of the embedding; ids from here on must never occur"
    pad: str | None
    "None: there is none, so that only packed examples can be made"
    bos: str | None = None
    "None: there is none; where a text has to begin with one, eos stands in its place"
    eos: str


class ModelRepository(Frozen):
    """A model on the Hugging Face hub; the revision, a commit, pins the content of its files."""

    name: str
    revision: str = Field(pattern=r"^[0-9a-f]{12,40}$")
    "the commit, or its first 12 digits or more where no more of it is known; what is fetched has to begin with them"
    ref: str = Field("", pattern=r"^(refs/pr/\d+)?$")
    "where that commit is, if not on the main branch: in a pull request, such as the hub's own to add safetensors"


class ModelSize(Frozen):
    """How large a model from elsewhere is: for estimates of time and memory alone, before its files are here. Counts
    are of shapes as they are known, not of files that were looked at; no table has them."""

    parameters: int = Field(gt=0)
    blocks: int = Field(gt=0)
    "of encoder and decoder"
    source: str = Field(min_length=3)


class ModelEntry(About):
    """Trained weights from elsewhere, and everything needed to trust and cite them."""

    source: Literal["bundled", "local", "hub"]
    architecture: str
    """class of transformers or of paperlm, or one that is converted: BitnetForCausalLM, Llama2cCheckpoint; another one
    is refused"""
    files: list[FileEntry] = []
    """of a bundled or local model: below the package's data, or `local_data`; one file in the GGUF format or of
    llama2.c, or a folder as transformers saves it"""
    hub: ModelRepository | None = None
    unused_weights: list[str] = []
    "shell patterns of weights in the files that the architecture has no place for"
    labels: list[str] = []
    "what has to stand wherever numbers of this model do"
    size: ModelSize | None = None
    "None: nothing says how long jobs on it take, and what they hold"
    norm: str = ""
    "the norm method of its blocks, whose colour it has in figures"
    without_tokenizer: bool = False
    "its weights alone are at hand, so that no text can be given to it"
    pickled: bool = False
    "a hub's model whose weights are a pickle alone; they are read by `pickled.to_safetensors` when they are fetched"
    unreadable: str = ""
    "why it cannot be read here; jobs on it are then `blocked`, and nothing is fetched"

    @property
    def predicts(self) -> Literal["tokens", "spans", "answers", ""]:
        """What the architecture's head predicts: next tokens, spans of a text, or texts that answer another one; empty:
        something else."""
        if self.without_tokenizer:
            return ""
        if self.architecture.endswith(("ForCausalLM", "LMHeadModel")):
            return "tokens"
        if self.architecture.endswith("ForConditionalGeneration"):
            return "answers"
        return "spans" if self.architecture.endswith("ForQuestionAnswering") else ""

    @model_validator(mode="after")
    def complete(self) -> ModelEntry:
        if (self.source == "hub") != (self.hub is not None) or (self.source == "hub") == bool(self.files):
            raise ValueError("a hub model has `hub`, a bundled or local one `files`")
        if self.pickled and not self.hub:
            raise ValueError("`pickled` is for a hub model: files of others are given as safetensors")
        return self


class Registry(Frozen):
    """Both files."""

    datasets: dict[str, DatasetEntry]
    tokenizers: dict[str, TokenizerEntry]
    models: dict[str, ModelEntry] = {}


class Place(Frozen):
    """Where a set of items, or a part of it, can be had; the keys are those of DatasetEntry."""

    source: Literal["bundled", "local", "hub"]
    revision: str
    fields: list[str] | None = None
    "instead of the set's"
    columns: dict[str, str] = {}
    splits: list[str] = []
    parts: dict[str, Part] = {}
    files: dict[str, list[FileEntry]] = {}
    hub: HubEntry | None = None
    deviations: list[str] = []


class ItemSet(Frozen):
    """A set of items and everything needed to trust and cite it, whichever place it comes from."""

    summary: str
    licence: str
    citation: str
    fields: list[str] = Field(min_length=1)
    places: dict[str, Place]

    def entries(self) -> dict[str, DatasetEntry]:
        """Name -> entry of each place."""
        shared = self.model_dump(exclude={"places"})
        return {n: DatasetEntry(**shared | place.model_dump(exclude_unset=True)) for n, place in self.places.items()}

    @model_validator(mode="after")
    def complete(self) -> ItemSet:
        self.entries()
        return self


class ItemSets(Frozen):
    """items.yaml."""

    items: list[ItemSet]


@functools.cache
def registry() -> Registry:
    """Texts, images, sets of items and tokenizers. Raises SpecError for a name that is used twice."""
    found = load(HERE / "registry.yaml", Registry)
    datasets = dict(found.datasets)
    for item_set in load(HERE / "items.yaml", ItemSets).items:
        entries = item_set.entries()
        if twice := set(datasets) & set(entries):
            raise SpecError(f"{HERE.name}/items.yaml: {', '.join(sorted(twice))}: the name is used already")
        datasets |= entries
    if twice := set(datasets) & set(found.models):
        raise SpecError(f"{HERE.name}/registry.yaml: {', '.join(sorted(twice))}: a dataset and a model of one name")
    return found.model_copy(update={"datasets": datasets})


def dataset_entry(dataset: str) -> tuple[str, DatasetEntry]:
    """Name and entry of `source:name`; SpecError if unknown or of another source."""
    source, _, name = dataset.partition(":")
    datasets = registry().datasets
    if name not in datasets:
        raise SpecError(unknown("dataset", name, datasets) + f"; add it to {HERE.name}/registry.yaml or items.yaml")
    if datasets[name].source != source:
        raise SpecError(f"dataset {name!r} is {datasets[name].source}:{name}, not {dataset}")
    return name, datasets[name]


def item_splits(dataset: str, splits: Iterable[str]) -> DatasetEntry:
    """Entry of a set of items that has these splits; SpecError for a text or an unknown split."""
    _, entry = dataset_entry(dataset)
    if not entry.fields:
        raise SpecError(f"dataset {dataset!r} is {entry.form}, no set of items")
    known = {*(entry.splits or entry.files), *entry.parts}
    for split in splits:
        if split not in known:
            raise SpecError(f"dataset {dataset!r}: {unknown('split', split, known)}")
    return entry


def tokenizer_entry(name: str) -> TokenizerEntry:
    """Entry of a tokenizer; SpecError if unknown."""
    if name not in registry().tokenizers:
        raise SpecError(unknown("tokenizer", name, registry().tokenizers))
    return registry().tokenizers[name]


def _known(find: Callable[[str], Any]) -> AfterValidator:
    """A field's check that the registry has what it names."""

    def check(value: str) -> str:
        try:
            find(value)
        except SpecError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


DatasetName = Annotated[str, Field(pattern=r"^(bundled|local|hub):[\w./-]+$"), _known(dataset_entry)]
"`source:name` of the registry."
TokenizerName = Annotated[str, _known(tokenizer_entry)]


def model_entry(model: str) -> tuple[str, ModelEntry]:
    """Name and entry of `source:name`; SpecError if unknown or of another source."""
    source, _, name = model.partition(":")
    models = registry().models
    if name not in models:
        raise SpecError(unknown("model", name, models) + f"; add it to {HERE.name}/registry.yaml")
    if models[name].source != source:
        raise SpecError(f"model {name!r} is {models[name].source}:{name}, not {model}")
    return name, models[name]


def is_model(name: str) -> bool:
    """Whether `source:name` is a model; no dataset has the name of one."""
    return name.partition(":")[2] in registry().models


def data_fingerprint(dataset: str, tokenizer: str | None = None) -> dict[str, Any]:
    """Checksums of the files and, of a text, the tokenizer: part of every job's and every prepared dataset's hash."""
    _, entry = dataset_entry(dataset)
    files = {split: [f.sha256 for f in files] for split, files in entry.files.items()}
    hub = entry.hub.model_dump(mode="json") if entry.hub else None
    share = entry.validation_share
    found = {"files": files, "hub": hub, "share": share}
    if entry.parts:
        found["parts"] = {split: part.model_dump(mode="json") for split, part in entry.parts.items()}
    if entry.columns:
        found["columns"] = entry.columns
    if entry.text_field != "text":
        found["text_field"] = entry.text_field
    if entry.held_out != "validation":
        found["held_out"] = entry.held_out
    if entry.images:
        found["images"] = entry.images.model_dump(mode="json")
    return found if tokenizer is None else found | {"tokenizer": tokenizer_entry(tokenizer).file.sha256}


def data_id(settings: dict[str, Any]) -> str:
    """Folder name of the prepared tokens of these settings, `paperlm.data.settings.TokenData` as plain values."""
    name, _ = dataset_entry(settings["dataset"])
    entry = tokenizer_entry(settings["tokenizer"])
    if settings["vocab_size"] != entry.vocab_size:
        raise DataError(
            f"tokenizer {settings['tokenizer']!r} has {entry.vocab_size} ids, the model vocab_size "
            f"{settings['vocab_size']}: set vocab_size to {entry.vocab_size} or choose another tokenizer"
        )
    slug = f"{name}-{settings['tokenizer']}-{settings['seq_len']}".replace("/", "_").lower()
    return f"{slug}-{digest({**settings, 'data': data_fingerprint(settings['dataset'], settings['tokenizer'])})}"
