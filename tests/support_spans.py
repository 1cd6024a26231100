"""Helpers of the tests on answers by spans: short items of SQuAD, a BERT of three blocks that learned them by heart."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter

import numpy as np
import torch
import transformers
from support_items import bundled
from support_models import fresh

from paperlm.data.items import prepare_any
from paperlm.data.settings import ItemData
from paperlm.data.shards import write_manifest
from paperlm.files import sha256_of

LENGTH, STRIDE, POSITIONS = 96, 24, 128
ITEMS, VOCABULARY = 12, 1000
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SHAPE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": POSITIONS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def short_items(count=ITEMS):
    """The bundled items of the shortest passages; most of them are longer than a window."""
    return sorted(bundled("eval/squad.validation"), key=lambda item: (len(item["context"]), item["id"]))[:count]


@functools.cache
def bert_tokenizer():
    """WordPiece of the bundled items' characters and their most common words, the same on every run."""
    items = bundled("eval/squad.validation")
    text = " ".join(item["context"] + " " + item["question"] for item in items).lower()
    letters = sorted(set(text) - set(" \n"))
    words = Counter(re.findall(r"[a-z]{2,}", text)).most_common()
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *(word for word, _ in words)]
    return transformers.BertTokenizer(vocab={piece: n for n, piece in enumerate(pieces[:VOCABULARY])})


def new_bert(seed=0, cls=transformers.BertForQuestionAnswering, **options):
    return fresh(cls, seed, vocab_size=VOCABULARY, **SHAPE | options)


def windows_by_hand(item, length=LENGTH, stride=STRIDE):
    """Windows as run_squad.py cuts them: ids, types, and of each token its number in the passage, None outside."""
    tokenizer = bert_tokenizer()
    plain = lambda text: tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # noqa: E731
    question, passage = plain(item["question"].strip())["input_ids"], plain(item["context"])
    ids, room = passage["input_ids"], length - len(question) - 3
    head = [tokenizer.cls_token_id, *question, tokenizer.sep_token_id]
    found, start = [], 0
    while True:
        part = ids[start : start + room]
        numbers = [None] * len(head) + list(range(start, start + len(part))) + [None]
        types = [0] * len(head) + [1] * (len(part) + 1)
        found.append({"ids": [*head, *part, tokenizer.sep_token_id], "types": types, "numbers": numbers})
        if start + len(part) == len(ids):
            return found, passage["offset_mapping"]
        start += min(len(part), stride)


@functools.cache
def learned_bert(steps=220):
    """A BERT that was trained on the windows of the short items, so that it answers most of them."""
    rows = []
    for item in short_items():
        windows, offsets = windows_by_hand(item)
        begin = item["answers"]["answer_start"][0]
        end = begin + len(item["answers"]["text"][0])
        inside = [n for n, (a, b) in enumerate(offsets) if a < end and b > begin]
        for window in windows:
            if {inside[0], inside[-1]} <= set(window["numbers"]):
                rows.append((window, window["numbers"].index(inside[0]), window["numbers"].index(inside[-1])))
    widest = max(len(window["ids"]) for window, _, _ in rows)
    ids, types, mask = (torch.zeros(len(rows), widest, dtype=torch.int64) for _ in range(3))
    for row, (window, _, _) in enumerate(rows):
        size = len(window["ids"])
        ids[row, :size], types[row, :size] = torch.tensor(window["ids"]), torch.tensor(window["types"])
        mask[row, :size] = 1
    first, last = (torch.tensor([row[place] for row in rows]) for place in (1, 2))
    model = new_bert().train()
    model.bert.embeddings.requires_grad_(False)  # else they learn it all, and no block matters
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-3)
    for _ in range(steps):
        loss = model(ids, mask, types, start_positions=first, end_positions=last).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def save_bert(folder, model):
    model.save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    return folder


def prepared_items(folder, items=None):
    """Manifest of the bundled set; with `items`, of these in the place of its own."""
    manifest = prepare_any(ItemData(dataset="bundled:squad", splits={"validation": None}), folder)
    if items is not None:
        path = folder / "validation.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        content = json.loads(manifest.read_text())
        content["splits"]["validation"] |= {"rows": len(items), "sha256": sha256_of(path)}
        write_manifest(folder, content)
    return manifest


def answers_by_hand(model, items, n_best=20, longest=30):
    """The loops of run_squad.py's write_predictions, one window a pass; slow and plain."""
    found = []
    for item in items:
        windows, offsets = windows_by_hand(item)
        spans = []
        for number, window in enumerate(windows):
            with torch.no_grad():
                out = model(torch.tensor([window["ids"]]), token_type_ids=torch.tensor([window["types"]]))
            start, end = out.start_logits[0].numpy(), out.end_logits[0].numpy()
            best = lambda x: sorted(range(len(x)), key=lambda i: x[i], reverse=True)[:n_best]  # noqa: E731
            for a in best(start):
                for b in best(end):
                    inside = window["numbers"][a] is not None and window["numbers"][b] is not None
                    if inside and a <= b < a + longest and most_context(windows, window["numbers"][a]) == number:
                        spans.append((start[a] + end[b], window["numbers"][a], window["numbers"][b]))
        _, a, b = max(spans, key=lambda span: span[0], default=(0, None, None))
        found.append("" if a is None else item["context"][offsets[a][0] : offsets[b][1]])
    return found


def most_context(windows, token):
    """Number of the window that sees most around a token of the passage."""
    scores = []
    for window in windows:
        seen = [n for n in window["numbers"] if n is not None]
        inside = seen[0] <= token <= seen[-1]
        scores.append(min(token - seen[0], seen[-1] - token) + 0.01 * len(seen) if inside else -np.inf)
    return int(np.argmax(scores))
