"""Tasks through EleutherAI's lm-evaluation-harness, on local items: `evaluate`, and its own command line, `main`.

The harness's definitions of the tasks are used as they are (prompt, choices, metrics); only where the items come from
is replaced, by a definition that includes the packaged one. Nothing is fetched, and nothing outlives a call on disk.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from paperlm.data.items import read_items
from paperlm.errors import DataError, SpecError, unknown
from paperlm.evaluate.tasks import Task, task_of
from paperlm.frozen import digest
from paperlm.result import Answers

PACKAGED = Path(lm_eval.__file__).parent / "tasks"
FEW_SHOT_SEED = 1234
"lm-eval's own default"
AHEAD = 4096
"requests that are tokenized together: enough for every core, and few to keep twice"

Splits = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the harness found. Keys of the first two are `task/metric`, of the others tasks."""

    metrics: dict[str, float]
    "shares between 0 and 1: acc, and acc_norm where the task has it"
    standard_errors: dict[str, float]
    "the harness's own"
    versions: dict[str, str]
    "of each task's definition, and `lm_eval`: of the package"
    items: dict[str, int]
    "items evaluated"
    answers: dict[str, Answers] = field(default_factory=dict)
    "key of the metrics -> which items were right, in the order of the set; of a group subject by subject"
    cut: dict[str, float] = field(default_factory=dict)
    "share of requests (an item with one of its options) that were cut on the left to the model's length"
    not_finite: dict[str, float] = field(default_factory=dict)
    "share of requests whose likelihood is no number; the harness then takes the first such option"
    likelihoods: list[float] = field(default_factory=list)
    "of every request, in nats, in the order of the harness"


class CountingLM(HFLM):
    """The harness's model for transformers, which also counts, per task, what it cuts and what is no number.

    Contexts get no token appended; a beginning-of-sequence token that the tokenizer itself adds stays. A request of
    more than `max_length` + 1 tokens keeps its last ones, as the harness has it (the last token is only predicted).
    Where the harness stops at an option longer than that, its last `max_length` tokens are scored. bos: each request
    begins with one, EOS where the tokenizer has none; one that is cut keeps it in front of its last `max_length`.
    apart: see `AskedModel.tokenized`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_length: int, batch_size: int, progress: bool, bos: bool = False,
        apart: bool = False,
    ) -> None:  # fmt: skip
        specials, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
            add_bos_token=False if specials[-1:] != plain[-1:] else None,
        )
        self.progress, self.bos, self.apart = progress, bos, apart
        self.requests, self.cut, self.not_finite = Counter(), Counter(), Counter()
        self.likelihoods: list[float] = []
        self._prefix = self.tokenizer.decode(self.prefix_token_id)
        self._asked: Iterator[list[tuple[str, str]]] = iter(())
        self._encoded: dict[str, list[int]] = {}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Likelihood of each request's option after its context, and whether greedy decoding gives it."""
        self._tasks = [request.task_name for request in requests]
        asked = [request.args for request in requests]
        self._asked = (asked[start : start + AHEAD] for start in range(0, len(asked), AHEAD))
        found = super().loglikelihood(requests, disable_tqdm=disable_tqdm or not self.progress)
        self.requests.update(self._tasks)
        self.likelihoods += [likelihood for likelihood, _ in found]
        pairs = zip(self._tasks, found, strict=True)
        self.not_finite.update(task for task, (likelihood, _) in pairs if not math.isfinite(likelihood))
        return found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """The harness's, which encodes one text after the other; what `_encode_pair` asks for is there already."""
        if add_special_tokens is None and not options and string in self._encoded:
            return self._encoded[string]
        return super().tok_encode(string, add_special_tokens=add_special_tokens, **options)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self.apart:
            return self.tok_encode(context.strip()), self.tok_encode(continuation.strip(), add_special_tokens=False)
        whole = context + continuation
        while not (whole in self._encoded or whole.startswith(self._prefix)) and (ahead := next(self._asked, None)):
            self._encoded = self._encode(ahead)
        return super()._encode_pair(context, continuation)

    def _encode(self, asked: Iterable[tuple[str, str]]) -> dict[str, list[int]]:
        """Tokens of what the harness encodes of these requests, on as many cores as the tokenizer takes: each whole,
        and its context, which the options of an item share. What begins with a special token is left to the harness."""
        texts = itertools.chain.from_iterable((context + option, context.rstrip()) for context, option in asked)
        texts = [text for text in dict.fromkeys(texts) if text and not text.startswith(self._prefix)]
        special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        return dict(zip(texts, self.tokenizer(texts, **special)["input_ids"], strict=True)) if texts else {}

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> list[tuple[float, bool]]:
        self._asked, self._encoded = iter(()), {}
        kept = []
        for task, (texts, context, option) in zip(self._tasks, requests, strict=True):
            if not option:
                raise DataError(f"task {task!r}: option {texts[1]!r} is no token of this tokenizer; correct the item")
            whole = context + option
            row = whole[-(self.max_length + 1) :]
            if self.bos:  # HFLM's prefix token is BOS, or else EOS
                whole = whole if whole[0] == self.prefix_token_id else [self.prefix_token_id, *whole]
                row = whole[:1] + whole[1:][-self.max_length :]
            self.cut[task] += len(row) < len(whole)
            scored = min(len(option), len(row) - 1)
            kept.append((texts, row[:-scored], row[-scored:]))
        return super()._loglikelihood_tokens(kept, *args, **options)


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    items: Mapping[str, Path],
    *,
    few_shot: int,
    max_length: int,
    batch_size: int,
    limit: int | None = None,
    few_shot_seed: int = FEW_SHOT_SEED,
    bos: bool = False,
    apart: bool = False,
    progress: bool = True,
) -> Evaluation:
    """Accuracies of a causal model of transformers on `tasks`.

    `items`: task -> manifest of its prepared items; `limit`: see `load_items`; `bos`, `apart`: see `CountingLM`. Raises
    what `load_items` raises.
    """
    lm = CountingLM(
        model, tokenizer, max_length=max_length, batch_size=batch_size, progress=progress, bos=bos, apart=apart
    )
    found = evaluate_lm(lm, tasks, items, few_shot=few_shot, limit=limit, few_shot_seed=few_shot_seed)
    return dataclasses.replace(
        found,
        cut=_share(lm.cut, lm, tasks),
        not_finite=_share(lm.not_finite, lm, tasks),
        likelihoods=lm.likelihoods,
    )


def evaluate_lm(
    lm: LM,
    tasks: Sequence[str],
    items: Mapping[str, Path],
    *,
    few_shot: int,
    limit: int | None = None,
    few_shot_seed: int = FEW_SHOT_SEED,
) -> Evaluation:
    """As `evaluate`, of any model that the harness knows how to ask."""
    loaded = load_items(tasks, items, few_shot=few_shot, limit=limit)
    with tempfile.TemporaryDirectory(prefix="paperlm-lm-eval-") as name:
        folder = Path(name)
        for task in tasks:
            _define(task, loaded[task], few_shot, folder)
        with _quiet_datasets(), _templates_compiled_once():
            results = lm_eval.simple_evaluate(
                model=lm,
                tasks=list(tasks),
                fewshot_random_seed=few_shot_seed,
                task_manager=TaskManager(include_path=str(folder), include_defaults=False),
                log_samples=True,
            )
    metrics, errors = {}, {}
    for task in tasks:
        for key, value in results["results"][task].items():
            metric, _, end = key.partition(",")
            if end != "none":
                continue
            if metric.endswith("_stderr"):
                errors[f"{task}/{metric.removesuffix('_stderr')}"] = float(value)
            else:
                metrics[f"{task}/{metric}"] = float(value)
    versions = {task: str(results["versions"][task]) for task in tasks} | {"lm_eval": lm_eval.__version__}
    counts = {task: len(loaded[task][task_of(task).split]) for task in tasks}
    answers = {}
    for task in tasks:
        answers |= _answers(task, results["samples"], loaded[task][task_of(task).split])
    return Evaluation(metrics=metrics, standard_errors=errors, versions=versions, items=counts, answers=answers)


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No progress bars, of which there is one a subject of MMLU; and local files are opened without a word to a server
    of the library's, which counts what is loaded."""
    bars, counts = datasets.is_progress_bar_enabled(), datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """A prompt's template is compiled once: the harness does it anew for every item and every example in front of it,
    which is four fifths of the time that prompts take it."""
    environment, compiled = lm_eval.utils.env, lm_eval.utils.env.from_string
    environment.from_string = functools.cache(compiled)
    try:
        yield
    finally:
        environment.from_string = compiled


def _answers(name: str, samples: Mapping[str, Sequence[Mapping[str, Any]]], rows: list[Any]) -> dict[str, Answers]:
    """`<task>/<metric>` -> which of `rows` were right: items of the harness count from each subject's first."""
    task = task_of(name)
    parts = sorted(part for part in samples if part.startswith(f"{name}_")) if task.group else [name]
    logged = [sample for part in parts for sample in sorted(samples[part], key=lambda sample: sample["doc_id"])]
    if len(logged) != len(rows):
        raise DataError(f"task {name!r}: lm-eval {lm_eval.__version__} answered {len(logged)} of {len(rows)} items")
    items = digest(rows, 16)
    return {
        f"{name}/{metric}": Answers.of((sample[metric] == 1 for sample in logged), items) for metric in task.metrics
    }


def load_items(
    tasks: Sequence[str], items: Mapping[str, Path], *, few_shot: int, limit: int | None = None
) -> dict[str, Splits]:
    """Task -> split -> items: what is evaluated, and with `few_shot` what examples are drawn from.

    `limit`: at most so many of the first items of a task are evaluated; of MMLU floor(limit / 57) of each subject, and
    at least two (the harness's standard error of a subject needs two). Raises SpecError for an unknown task, DataError
    for items that are missing, altered or lack a field, and for fewer than two items or too few examples.
    """
    return {name: _load(name, task_of(name), items, few_shot, limit) for name in tasks}


def _load(name: str, task: Task, items: Mapping[str, Path], few_shot: int, limit: int | None) -> Splits:
    if name not in items:
        raise DataError(f"task {name!r}: no items given; prepare its set of the registry and name the manifest")
    manifest = items[name]
    wanted = [task.split, task.few_shot_split] if few_shot else [task.split]
    splits = {split: read_items(manifest, split) for split in wanted}
    for split, rows in splits.items():
        for number, row in enumerate(rows, start=1):
            if missing := [key for key in task.fields if key not in row]:
                raise DataError(
                    f"{manifest.parent}, {split} split, item {number}: no {', '.join(map(repr, missing))}, which task "
                    f"{name!r} reads"
                )
    parts = _by_subject(splits) if task.group else {"": splits}
    if limit is not None:
        limit = max(2, limit // len(parts)) if task.group else limit
    for subject, part in parts.items():
        part[task.split] = part.get(task.split, [])[:limit]
        where = f"{manifest.parent}, {task.split} split" + (f", subject {subject}" if subject else "")
        if len(part[task.split]) < 2:
            raise DataError(f"{where}: {len(part[task.split])} items; a standard error needs two")
        if len(part.get(task.few_shot_split, [])) < few_shot:
            examples = len(part.get(task.few_shot_split, []))
            raise DataError(f"{where}: the {task.few_shot_split} split has {examples} examples for {few_shot} shots")
    return {split: [row for part in parts.values() for row in part[split]] for split in wanted}


def _by_subject(splits: Splits) -> dict[str, Splits]:
    parts: dict[str, Splits] = {}
    for split, rows in splits.items():
        for row in rows:
            parts.setdefault(row["subject"], {}).setdefault(split, []).append(row)
    return dict(sorted(parts.items()))


def _define(name: str, splits: Splits, few_shot: int, folder: Path) -> None:
    """Write the task's definition and items into `folder`."""
    task = task_of(name)
    if task.group is None:
        _define_one(name, task.definition, task, splits, few_shot, folder)
        return
    parts = _by_subject(splits)
    for subject, part in parts.items():
        _define_one(f"{name}_{subject}", task.definition.format(subject=subject), task, part, few_shot, folder)
    group = yaml.safe_load((PACKAGED / task.group).read_text(encoding="utf-8"))
    group["task"] = [f"{name}_{subject}" for subject in parts]
    (folder / f"_{name}.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")


def _define_one(name: str, definition: str, task: Task, splits: Splits, few_shot: int, folder: Path) -> None:
    packaged = PACKAGED / definition
    if not packaged.is_file():
        raise DataError(f"task {name!r}: lm-eval {lm_eval.__version__} has no {definition}")
    files = {}
    for split, rows in splits.items():
        path = folder / f"{name}.{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files[split] = str(path)
    # A split that the packaged definition names and that is not here must be switched off: the harness opens them all.
    roles = {"training_split": "train", "validation_split": "validation", "test_split": "test"}
    content = {
        "include": str(packaged),
        "task": name,
        "tag": None,
        "num_fewshot": few_shot,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        **{role: split if split in splits else None for role, split in roles.items()},
    }
    if task.few_shot_split not in roles.values():
        content["fewshot_split"] = task.few_shot_split if task.few_shot_split in splits else None
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def _share(counts: Counter, lm: CountingLM, tasks: Sequence[str]) -> dict[str, float]:
    """Task -> counted share of its requests; a group's subjects are one task."""
    total, found = Counter(), Counter()
    for name, requests in lm.requests.items():
        task = next(task for task in tasks if name == task or name.startswith(f"{task}_"))
        total[task] += requests
        found[task] += counts[name]
    return {task: found[task] / total[task] for task in tasks}


def main(arguments: Sequence[str]) -> None:
    """lm-eval's own command line, with the decoder registered: `--model hf --model_args pretrained=<model folder>`.

    Raises SpecError for a task that lm-eval does not know.
    """
    from lm_eval.__main__ import cli_evaluate

    import paperlm.models.llama  # noqa: F401 - makes the Auto classes know the decoder

    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    except ValueError as error:
        found, _, missing = str(error).partition("Tasks not found: ")
        if found or not missing:
            raise
        known = TaskManager().all_tasks
        raise SpecError("--tasks: " + "; ".join(unknown("task", task, known) for task in missing.split(", "))) from None
