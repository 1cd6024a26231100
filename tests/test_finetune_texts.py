"""What fine-tuning makes of items: texts to ids, bad items, held-out sets and their losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_finetune import CPU, inputs, instruction_items, sft, write_model, write_set

from paperlm.errors import DataError
from paperlm.finetune import examples, measure
from paperlm.finetune.examples import Example
from paperlm.jobs import run_job
from paperlm.models.folder import load_model, transformers_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return transformers_tokenizer("bpe1024", 128)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("parent"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instructions")
    return write_set(folder, train=instruction_items(30), validation=instruction_items(6, start=100))


# -- texts to ids --


def test_instructions_take_the_format_with_or_without_an_input():
    items = [
        ("a", {"instruction": "Add.", "input": "1 2", "output": "3"}),
        ("b", {"instruction": "Go.", "output": "x"}),
    ]
    with_input, without = examples.instructions(items)
    assert with_input[0].endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    assert "paired with an input" in with_input[0]
    assert without[0].endswith("### Instruction:\nGo.\n\n### Response:\n")
    assert "paired" not in without[0]


@pytest.mark.parametrize("name", ["bpe1024", "t5"])
def test_the_answer_of_an_encoded_text_starts_where_the_prompt_ends(name):
    tokenizer = transformers_tokenizer(name, 128)
    prompt, answer = "Name a colour.\n\n### Response:\n", "the correct answer is red"
    example = examples.encode_instruction(tokenizer, prompt, answer, 99, "end")
    assert tokenizer.decode(example.ids[example.answer :]).strip() == f"{answer}{tokenizer.eos_token}"
    assert not example.cut


def test_a_long_text_loses_its_end_and_the_answer_or_its_start(tokenizer):
    prompt, answer = "word " * 40 + "\n", "yes"
    whole = examples.encode_instruction(tokenizer, prompt, answer, 999, "end")
    n = len(whole.ids)
    assert examples.encode_instruction(tokenizer, prompt, answer, n, "end") == whole
    end = examples.encode_instruction(tokenizer, prompt, answer, 20, "end")
    assert (end.ids, end.answer, end.cut) == (whole.ids[:20], 20, True)
    start = examples.encode_instruction(tokenizer, prompt, answer, 20, "start")
    assert (start.ids, start.answer, start.cut) == (whole.ids[-20:], whole.answer - (n - 20), True)
    within = examples.encode_instruction(tokenizer, prompt, answer, 2, "start")  # shorter than the answer with eos
    assert (within.ids, within.answer) == (whole.ids[-2:], 0)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"instruction": "x"}, "field 'output' is missing"),
        ({"instruction": "x", "output": " "}, "field 'output' is empty"),
        ({"instruction": 3, "output": "y"}, "field 'instruction' is no text"),
    ],
)
def test_a_bad_item_is_named_with_file_and_line_before_training(tmp_path, parent, item, message):
    data = write_set(tmp_path, train=[*instruction_items(1), item], validation=instruction_items(2))
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: " + message):
        run_job(sft(), inputs(tmp_path / "job", data, of=parent), CPU)


def test_a_missing_split_and_an_altered_file_are_named(tmp_path, parent):
    data = write_set(tmp_path, train=instruction_items(3))
    with pytest.raises(DataError, match=r"no split 'validation' was prepared"):
        run_job(sft(), inputs(tmp_path / "job", data, of=parent), CPU)
    (tmp_path / "train.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"train\.jsonl: missing, truncated or altered"):
        examples.placed_items(data, "train")


def test_a_set_of_one_split_holds_its_last_items_out(tmp_path, parent):
    data = write_set(tmp_path, train=instruction_items(20))
    job = sft(validation_split="train", examples=8, validation_examples=5, epochs=1.0)
    assert job.data()[0].splits == {"train": None}
    result = run_job(job, inputs(tmp_path / "job", data, of=parent), CPU)
    found = [result.metrics[name] for name in ("examples", "eval_examples", "eval_examples_seen")]
    assert found == [8, 5, 0]
    with pytest.raises(DataError, match="20 items; holding 20 out leaves none"):
        run_job(sft(validation_split="train", validation_examples=20), inputs(tmp_path / "x", data, of=parent), CPU)


def test_examples_whose_answer_does_not_fit_are_refused_if_the_loss_counts_answers_only(tmp_path, parent, data):
    with pytest.raises(DataError, match="0 training examples fit into a block of 16 ids"):
        run_job(sft(block=16, loss_on="answer"), inputs(tmp_path, data, of=parent), CPU)


# -- held-out measurements --


def test_token_losses_are_those_of_the_model_alone_in_float64(parent):
    model = load_model(parent)
    generator = np.random.default_rng(0)
    rows = [Example(generator.integers(2, 1024, n).tolist(), a) for n, a in ((5, 2), (70, 64), (2, 1), (33, 0))] * 30
    for answer_only in (False, True):
        sums, counts = measure.token_losses(model, rows, answer_only, "fp32")
        for example, found, count in list(zip(rows, sums, counts, strict=True))[:8]:
            ids = torch.tensor([example.ids])
            losses = -load_model(parent).double()(ids).logits[0, :-1].detach().log_softmax(-1)
            losses = losses.gather(-1, ids[0, 1:, None])[:, 0]
            first = max(1, example.answer) if answer_only else 1
            assert count == len(example.ids) - first
            assert found == pytest.approx(float(losses[first - 1 :].sum()), rel=1e-5)


def test_the_error_of_a_ratio_covers_resampled_means():
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 9, 400)
    sums = counts * generator.gamma(2.0, 1.0, 400)
    ratio, error = measure.ratio_and_error(sums, counts)
    draws = generator.integers(0, 400, (2000, 400))
    resampled = sums[draws].sum(1) / counts[draws].sum(1)
    assert ratio == sums.sum() / counts.sum()
    assert error == pytest.approx(resampled.std(), rel=0.06)


def test_measuring_leaves_the_mode_of_the_model(parent):
    model = load_model(parent).train()
    measure.token_losses(model, [Example([1, 2, 3], 1)] * 2, False, "fp32")
    assert model.training
    assert all(p.grad is None for p in model.parameters())
