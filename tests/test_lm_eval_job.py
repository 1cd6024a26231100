"""The job that evaluates a model on tasks: what it hands over, its name and data, settings and items it refuses."""

import pytest
import torch
from support_items import prepared, rewrite, small_model, without

from paperlm.errors import DataError, JobError
from paperlm.evaluate.harness import evaluate
from paperlm.evaluate.questions import at_once
from paperlm.jobs.base import Inputs, Job, Machine
from paperlm.jobs.lm_eval import LmEval, run
from paperlm.models.folder import save_model, transformers_tokenizer


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("items"))


@pytest.fixture(scope="module")
def tokenizer():
    return transformers_tokenizer("bpe1024", 128)


@pytest.fixture(scope="module")
def model():
    return small_model()


class Parent(Job):
    """Stands for a trained model."""

    kind = "pretrain"
    summary = "toy"
    name: str = "toy"

    def slug(self):
        return f"pre_ln-{self.name}"


BOS = "its tokenizer has no BOS: each request begins with its EOS"
SETTINGS = {"tasks": ["arc_easy", "boolq"], "source": "bundled", "few_shot": 0, "max_length": 48}


@pytest.fixture
def inputs(model, tokenizer, items, tmp_path):
    save_model(tmp_path / "model", model, tokenizer)
    data = tuple(items[name] for name in SETTINGS["tasks"])
    return Inputs(data=data, models={"of": tmp_path / "model"}, work=tmp_path / "work")


def test_the_job_hands_over_metrics_errors_versions_and_says_what_was_cut(inputs, model, tokenizer, items):
    job = LmEval(of=Parent(), items=9, **SETTINGS)
    result = run(job, inputs, Machine(device="cpu", progress=False))
    assert result.outcome == "measured" and result == run(job, inputs, Machine(device="cpu", progress=False))
    same = evaluate(model, tokenizer, job.tasks, items, few_shot=0, max_length=48, batch_size=16, limit=9)
    assert {k: v for k, v in result.metrics.items() if "acc" in k} == same.metrics
    assert result.metrics["boolq/items"] == 9 and result.metrics["boolq/cut"] == 1.0
    assert "boolq: 100 % of requests cut on the left to 48 tokens" in result.labels
    assert {"arc_easy: a subset of 9 items", "boolq: a subset of 9 items"} <= set(result.labels)
    assert set(result.standard_errors) <= set(result.metrics) and result.versions == same.versions
    assert result.answers == same.answers and {key: a.items for key, a in result.answers.items()} == {
        "arc_easy/acc": 9, "arc_easy/acc_norm": 9, "boolq/acc": 9,
    }  # fmt: skip


def test_unusable_items_are_named_before_a_model_is_read(inputs, tmp_path):
    data = (rewrite(inputs.data[0], tmp_path, without("choices")), inputs.data[1])
    broken = Inputs(data=data, models={"of": tmp_path / "no such folder"}, work=tmp_path)
    with pytest.raises(DataError, match="item 7: no 'choices'"):
        run(LmEval(of=Parent(), **SETTINGS), broken, Machine(device="cpu"))
    with pytest.raises(JobError, match="no such folder"):
        run(LmEval(of=Parent(), **SETTINGS), Inputs(data=inputs.data, models=broken.models, work=tmp_path), Machine())


def test_the_jobs_name_and_data_follow_from_its_settings():
    job = LmEval(of=Parent(), **SETTINGS)
    assert job.job_id.startswith("lm_eval-0shot-pre_ln-toy-")
    assert [data.splits for data in job.data()] == [{"test": None}, {"validation": None}]
    few = LmEval(of=Parent(), **SETTINGS | {"few_shot": 5})
    assert [data.splits for data in few.data()] == [{"test": None, "train": None}, {"validation": None, "train": None}]
    ids = {
        j.job_id for j in (job, few, LmEval(of=Parent(name="b"), **SETTINGS), LmEval(of=Parent(), items=9, **SETTINGS))
    }
    assert len(ids) == 4 and LmEval(of=Parent(), few_shot_seed=1234, **SETTINGS).job_id == job.job_id
    full = LmEval(of=Parent(), **SETTINGS | {"source": "hub"})
    assert [d.dataset for d in full.data()] == ["hub:allenai/ai2_arc/ARC-Easy", "hub:aps/super_glue/boolq"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["hellaswg"]}, "unknown task 'hellaswg'; did you mean 'hellaswag'"),
        ({"tasks": ["piqa", "piqa"]}, "named twice"),
        ({"tasks": []}, "at least 1 item"),
        ({"items": 1}, "greater than or equal to 2"),
        ({"source": "mirror"}, "'bundled', 'local' or 'hub'"),
    ],
)
def test_bad_settings_of_the_job_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LmEval(of=Parent(), **SETTINGS | change)


def test_on_a_gpu_as_many_requests_go_together_as_their_logits_leave_room_for(monkeypatch):
    assert at_once(Machine(device="cpu"), 256) == at_once(Machine(device="cpu"), 4096) == 16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words, most = 32_000, 2**33  # float32 logits of LLaMA's vocabulary, and a tenth of a card of 80 GB
    for length in (48, 256, 384, 2048, 4096):
        requests = at_once(Machine(), length)
        assert requests >= 1 and 4 * words * requests * length <= most < 4 * words * 4 * (requests + 1) * length
    assert at_once(Machine(), 2**20) == 1, "one is always asked"
    assert at_once(Machine(micro_batch=3), 256) == at_once(Machine(device="cpu", micro_batch=3), 256) == 3


def test_where_requests_begin_with_bos_likelihoods_are_others_and_a_stand_in_is_said(inputs):
    plain, begun = (
        run(LmEval(of=Parent(), **SETTINGS, **more), inputs, Machine(device="cpu", progress=False))
        for more in ({}, {"begin": "bos"})
    )
    assert BOS in begun.labels and BOS not in plain.labels
    assert begun.answers != plain.answers or begun.metrics != plain.metrics


def test_texts_are_not_tokenized_apart_where_a_blank_belongs_to_the_next_word(inputs, tmp_path, model):
    """Byte-level vocabularies: an option without its blank would be glued to the context."""
    job = LmEval(of=Parent(), **SETTINGS, tokenized="apart")
    with pytest.raises(JobError, match="tokenized: apart"):
        run(job, inputs, Machine(device="cpu", progress=False))
    save_model(tmp_path / "pieces", small_model(32_128), transformers_tokenizer("t5", 128))
    pieces = Inputs(data=inputs.data, models={"of": tmp_path / "pieces"}, work=inputs.work)
    assert run(job, pieces, Machine(device="cpu", progress=False)).outcome == "measured"
