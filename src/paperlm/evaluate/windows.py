"""Losses of a model over windows of a text that do not overlap: the protocol of NeuZip's perplexities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paperlm.errors import JobError
from paperlm.jobs.base import Machine


def windows_of(title: str, folder: Path, text: str, length: int) -> list[list[int]]:
    """The text in tokens of the model in `folder`, so many a window, the rest dropped. JobError for a shorter text."""
    from paperlm.models.folder import load_tokenizer

    ids = load_tokenizer(folder)(text, add_special_tokens=False, verbose=False)["input_ids"]
    found = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if not found:
        raise JobError(f"{title}: the text has {len(ids)} tokens, less than a window of {length}: ask for more")
    return found


def mean_losses(model: Any, windows: list[list[int]], machine: Machine, title: str = "") -> list[float]:
    """Of each window, over all its tokens but the first, in nats. The model is on the machine's device; `title` names
    the progress bar, and without one there is none."""
    import torch
    from tqdm import tqdm

    from paperlm.probe.text import LOGITS, SEQUENCES

    device = machine.torch_device()
    room = LOGITS[device.type] // (model.config.vocab_size * len(windows[0]))
    at_once = machine.micro_batch or max(1, min(SEQUENCES, room))
    found: list[float] = []
    starts = range(0, len(windows), at_once)
    with torch.no_grad():
        for start in tqdm(starts, desc=title, unit="batch", disable=not (machine.progress and title)):
            ids = torch.tensor(windows[start : start + at_once], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            found += losses.double().mean(1).tolist()
    return found
