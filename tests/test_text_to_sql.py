"""A T5 that writes SQL: the same bits however its weights lie, and what is blocked."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from paperlm_kernels.stored import LomoSgd
from pydantic import ValidationError
from safetensors.torch import load_file
from support_engine import numbers, start, wait_for_update
from support_field_values import WIDE
from support_small_jobs import job
from support_stored import TABLES

from paperlm.data.items import prepare_items, read_items
from paperlm.data.tokenizer import TextTokenizer
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.text_to_sql import PREFIX, SHAPE, run
from paperlm.plan.project import ROOT
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.train import qlora
from paperlm.train.repeatable import repeatable
from paperlm.train.text_to_sql import batch, build_adapter, drawn_on, shape_of

QUIET = Machine(device="cpu", progress=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_items(job("text_to_sql").data()[0], tmp_path_factory.mktemp("sql"))


def made(data, machine=QUIET, **changes):
    with tempfile.TemporaryDirectory() as work:
        return run(job("text_to_sql", **changes), Inputs(data=(data,), work=Path(work)), machine)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_packed_and_raw_weights_and_both_orders_of_update_end_in_the_same_bits(data, device):
    # wide enough that its matrices are coded
    shape = {"hidden_size": 192, "intermediate_size": 256, "n_heads": 3, "head_size": 64, "n_layers": 1}
    runs = [
        made(data, Machine(device=device, progress=False), **shape, optimizer=optimizer, weights=weights)
        for optimizer, weights in (("lomo", "packed"), ("lomo", "raw"), ("sgd", "raw"))
    ]
    for name in ("weights_hash", "bleu", "loss"):
        assert len({one.metrics[name] for one in runs}) == 1
    assert runs[0].series == runs[1].series == runs[2].series
    sizes = [one.metrics["state_bytes"] for one in runs]
    tables = 8 * 16 * TABLES / (12 * 192**2 + 4 * 192 * 256)  # of the encoder's six matrices and the decoder's ten
    assert sizes == sorted(set(sizes)) and 10.5 < runs[0].metrics["bits_per_weight"] - tables < 12.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU all kernels repeat")
def test_every_gradient_of_a_wide_t5_repeats_to_the_last_bit_on_a_gpu():
    from transformers import T5Config, T5ForConditionalGeneration

    device = torch.device("cuda")
    torch.manual_seed(0)
    shape = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=32000, dropout_rate=0.0, **shape)).bfloat16().to(device)
    g = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, 32000, (16, length), generator=g).to(device) for length in (384, 96))
    ids[:, ::3] = 5  # words that occur thousands of times
    found = []
    with repeatable(device):
        for _ in range(4):
            model.zero_grad()
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    parted = {name for other in found[1:] for name in other if not torch.equal(found[0][name], other[name])}
    assert not parted


@pytest.mark.parametrize("weights", ["raw", "packed"])
def test_a_job_killed_twice_ends_in_the_same_record_and_weights_bit_for_bit(data, tmp_path, weights):
    made_of = job("text_to_sql", **WIDE, steps=36, weights=weights)
    unbroken, root = tmp_path / "unbroken", tmp_path / "root"
    unbroken.mkdir()
    whole = run(made_of, Inputs(data=(data,), work=tmp_path / "work", model=unbroken), QUIET)
    places = Places(root, "smoke")
    shutil.copytree(ROOT / "workflow/scales", root / "workflow/scales")
    shutil.copytree(data.parent, (root / places.data(made_of.data()[0])).parent)
    for update in (6, 20):
        process = start(made_of, root)
        wait_for_update(root / places.work(made_of), update, process)
        process.kill()
        process.wait()
        assert not places.is_file(places.made(made_of)) and not places.is_file(places.manifest(made_of))
    process = start(made_of, root)
    assert process.wait(timeout=300) == 0, process.stderr.read()
    resumed = read_record(root / places.made(made_of), made_of.job_id)
    assert numbers(resumed) == numbers(whole) and len(resumed.series["train"].rows) == 36
    assert len(resumed.cost.resumed_from) == 2
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (root / places.model(made_of), unbroken))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_rate_falls_along_a_line(data, monkeypatch):
    rates = []

    class Noted(LomoSgd):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    monkeypatch.setattr("paperlm.train.text_to_sql.LomoSgd", Noted)
    made(data, steps=4, peak_lr=0.2)
    assert rates == pytest.approx([0.2, 0.15, 0.1, 0.05])


def test_it_is_judged_by_questions_that_it_was_not_trained_on(data, monkeypatch):
    from paperlm.train import text_to_sql

    seen, judged = [], text_to_sql.judged
    monkeypatch.setattr(text_to_sql, "judged", lambda *given: (seen.append(given[3]), judged(*given))[1])
    made(data, steps=1)
    assert seen == [read_items(data, "validation")]
    assert not {item["question"] for item in seen[0]} & {item["question"] for item in read_items(data, "train")}


def test_its_bleu_and_its_share_of_right_answers_have_standard_errors_over_items(data, monkeypatch):
    from paperlm.train import text_to_sql

    monkeypatch.setattr(text_to_sql, "bleu", lambda written, right: (3.0, 0.25 * len(right)))
    found = made(data, steps=1)
    assert found.metrics["bleu"] == 3.0 and found.standard_errors["bleu"] == 0.25 * len(read_items(data, "validation"))
    items = len(read_items(data, "validation"))
    assert found.metrics["exact"] == 0.0
    assert found.standard_errors["exact"] == text_to_sql.error_of_share(0, items) > 0


def test_no_share_of_right_answers_is_certain_and_far_from_both_ends_its_error_is_the_plain_one():
    from paperlm.train.text_to_sql import error_of_share

    assert [error_of_share(right, 98) for right in (0, 98)] == pytest.approx([(0.01 * 0.99 / 100) ** 0.5] * 2)
    assert error_of_share(0, 98) > error_of_share(0, 998) > 0, "more items say more"
    assert error_of_share(500, 1000) == pytest.approx((0.5 * 0.5 / 1000) ** 0.5, rel=0.01)
    assert error_of_share(1, 1) < 0.5, "of a single item too"


def test_space_around_an_answer_makes_it_neither_right_nor_wrong():
    from paperlm.train.text_to_sql import judged

    class Knowing(torch.nn.Module):
        def forward(self, labels, **given):
            return SimpleNamespace(logits=torch.zeros(*labels.shape, 1024))

        def generate(self, **given):
            return torch.tensor(tokenizer.encode([" SELECT count(*) FROM a"]))

    tokenizer = TextTokenizer("bpe1024")
    items = [{"question": "how many", "context": "a", "answer": "SELECT count(*) FROM a \n"}]
    numbers, _ = judged(job("text_to_sql"), Knowing(), tokenizer, items, torch.device("cpu"))
    assert numbers["exact"] == 1 and numbers["bleu"] == pytest.approx(100)


def test_it_learns(data):
    found = made(data, steps=40, peak_lr=0.3, batch=6)
    assert found.cost.micro_batch == 6, "an update is one pass"
    losses = found.series["train"].column("loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_text_is_prefix_context_and_question_and_what_is_longer_loses_its_end():
    item = {"question": "how many", "context": "CREATE TABLE a (b INTEGER)", "answer": "SELECT count(*) FROM a"}
    tokenizer, made_of = TextTokenizer("bpe1024"), job("text_to_sql", source_length=20, target_length=60)
    given = batch(made_of.held_out(), tokenizer, [item, {**item, "answer": "SELECT 1"}], "cpu")
    whole = tokenizer.inner.decode(given["input_ids"][0].tolist())
    assert f"{PREFIX}CREATE TABLE a (b INTEGER) how many".startswith(whole.removesuffix("</s>"))
    assert given["input_ids"].shape == (2, 20) and (given["input_ids"][:, -1] == tokenizer.eos).all()
    labels = given["labels"][1]
    assert tokenizer.inner.decode(labels[labels >= 0].tolist()) == "SELECT 1" and (labels == -100).any()


def test_adapters_and_speed_without_a_gpu_are_blocked_with_the_reason(data):
    assert "QLoRA" in made(data, adapter="nf4").reason
    assert "GPU" in made(data, timed=True).reason


def test_an_adapter_of_a_timed_job_stands_beside_drawn_weights_in_four_bits_which_leave_nothing_on_the_disk(tmp_path):
    """Speed and memory depend on no weight, so that no model need be trained for them."""
    wanted = job("text_to_sql", **WIDE | {"intermediate_size": 256, "head_size": 64}, adapter="nf4", timed=True)
    assert wanted.never() == ""
    tokenizer, cpu = TextTokenizer(wanted.tokenizer), torch.device("cpu")
    model, parameters = build_adapter(wanted, tokenizer, cpu, None, tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []
    torch.manual_seed(wanted.seed)
    drawn = drawn_on(cpu, shape_of(wanted, tokenizer))
    assert parameters == sum(p.numel() for p in drawn.parameters())
    bytes_of = qlora.of_weights(model)
    assert bytes_of["bits_per_weight"] == pytest.approx(4.5, abs=0.1), "4 bits, and 32 of each 64 weights' scale"
    ids = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    loss, right = (one(input_ids=ids, labels=ids).loss.item() for one in (model, drawn))
    assert loss == pytest.approx(right, rel=0.1), "weights of the same draw, rounded"
    assert model.is_gradient_checkpointing, "its memory stands beside that of rows which recompute activations"


def test_a_set_without_contexts_is_refused():
    with pytest.raises(ValidationError, match="no field 'context'"):
        job("text_to_sql", dataset="bundled:arc_easy")


def test_a_model_that_such_a_job_trained_is_trained_on_and_an_adapter_beside_it(data, tmp_path):
    """What stands in for a published T5 where none is at hand."""
    # bitsandbytes multiplies on a CPU by matrices of so many times 32 rows
    first, shape = job("text_to_sql", **WIDE | {"intermediate_size": 256, "head_size": 64}), dict.fromkeys(SHAPE)
    folder = tmp_path / "first"
    folder.mkdir()
    run(first, Inputs(data=(data,), work=tmp_path / "work", model=folder), QUIET)
    losses = {}
    for name, changes in (("further", {}), ("adapter", {"adapter": "nf4"})):
        wanted = job("text_to_sql", of=first, **shape, **changes)
        (tmp_path / name).mkdir()
        found = run(wanted, Inputs(data=(data,), models={"of": folder}, work=tmp_path / name), QUIET)
        assert found.outcome == "trained" and wanted.never() == ""
        losses[name] = found.series["train"].column("loss")
    fresh = run(first, Inputs(data=(data,), work=tmp_path / "again"), QUIET).series["train"].column("loss")
    assert losses["further"][0] < fresh[0], "it begins where the first one ended"
    assert losses["adapter"][0] == pytest.approx(losses["further"][0], rel=0.1), "and so do weights of four bits"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter": "nf4"}, "leaves no model; name another"),
        ({"timed": True}, "leaves no model; name another"),
        ({"tokenizer": "t5", "vocab_size": 32_000}, "tokenizer: bpe1024, and that of `of` is t5: give the same"),
    ],
)
def test_a_trained_model_that_leaves_nothing_or_has_other_tokens_is_refused(changes, words):
    first = job("text_to_sql", **WIDE | changes)
    with pytest.raises(ValidationError, match=words):
        job("text_to_sql", of=first, **dict.fromkeys(SHAPE))


def test_weights_of_a_timed_job_are_drawn_on_its_device_in_bfloat16_with_the_deviations_of_one_that_is_trained():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=500, d_model=128, d_ff=512, d_kv=32, num_layers=2, num_heads=4)
    right = dict(transformers.T5ForConditionalGeneration(config).named_parameters())
    found = dict(drawn_on(torch.device("cpu"), config).named_parameters())
    assert all(p.is_meta for p in drawn_on(torch.device("meta"), config).parameters()), "and nowhere else before"
    assert {name: p.shape for name, p in found.items()} == {name: p.shape for name, p in right.items()}
    for name, p in found.items():
        assert p.dtype == torch.bfloat16 and p.requires_grad, name
        if p.numel() > 4000:  # of fewer a deviation says little
            assert 0.8 < float(p.detach().float().std() / right[name].detach().std()) < 1.25, name
