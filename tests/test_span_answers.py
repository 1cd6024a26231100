"""Answers by spans: against run_squad.py's own loops, MLQA's script and models built without a layer."""

import json

import pytest
import safetensors.torch
import torch
import transformers
from lm_eval.tasks.mlqa.utils import exact_match_score, f1_score
from pydantic import ValidationError
from support_items import bundled
from support_probe import inputs, new_model, register, save
from support_spans import (
    ITEMS,
    LENGTH,
    POSITIONS,
    STRIDE,
    answers_by_hand,
    bert_tokenizer,
    learned_bert,
    new_bert,
    prepared_items,
    save_bert,
    short_items,
    windows_by_hand,
)  # fmt: skip

from paperlm.data.model_files import ModelData, _commit, prepare_model_files
from paperlm.data.registry import ModelRepository, registry
from paperlm.errors import DataError, JobError
from paperlm.evaluate.spans import answer, load_questions, require_spans, scores, windows_of
from paperlm.files import write_sealed
from paperlm.jobs import block_removal, job_from, span_answers
from paperlm.jobs.angular_distance import AngularDistance
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.block_removal import BlockRemoval
from paperlm.jobs.gradient_norms import GradientNorms
from paperlm.jobs.hub_model import HubModel
from paperlm.jobs.hub_model import run as run_hub_model
from paperlm.jobs.lm_eval import LmEval
from paperlm.jobs.perturbed_perplexity import PerturbedPerplexity
from paperlm.jobs.span_answers import SpanAnswers
from paperlm.jobs.stored_perplexity import StoredPerplexity
from paperlm.jobs.stored_speed import StoredSpeed
from paperlm.jobs.text_perplexity import TextPerplexity

QA = "hub:google-bert/bert-large-uncased-whole-word-masking-finetuned-squad"
MASKED = "hub:google-bert/bert-large-uncased"
DECODER = "local:smollm2_135m_instruct"
TEXT = {"text": "bundled:c4_sample", "text_tokens": 16}
CPU = Machine(device="cpu", progress=False)
BEST = {"n_best": 20, "longest": 30, "batch_size": 4}


@pytest.fixture(scope="module")
def model():
    return learned_bert()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("bert"), model)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return prepared_items(tmp_path_factory.mktemp("squad"), short_items())


def spans(**settings):
    return SpanAnswers(
        **{"of": HubModel(name=QA), "source": "bundled", "max_length": LENGTH, "stride": STRIDE} | settings
    )


def removal(**settings):
    return BlockRemoval(
        **{"of": HubModel(name=QA), "task": "squad", "source": "bundled", "max_length": LENGTH} | settings
    )


@pytest.fixture
def narrow(monkeypatch):
    """block_removal with windows that begin as often as those of these tests."""
    whole = BlockRemoval.evaluation
    monkeypatch.setattr(BlockRemoval, "evaluation", lambda job: whole(job).model_copy(update={"stride": STRIDE}))


# -- windows, spans, scores ----


def test_windows_are_those_of_run_squad_and_each_token_may_start_an_answer_in_one_of_them():
    items = short_items(30)
    found = windows_of(bert_tokenizer(), items, max_length=LENGTH, stride=STRIDE)
    several = 0
    for number, item in enumerate(items):
        mine = [window for window in found if window.item == number]
        by_hand, offsets = windows_by_hand(item)
        several += len(mine) > 1
        assert [list(w.tokens["input_ids"]) for w in mine] == [w["ids"] for w in by_hand]
        assert [list(w.tokens["token_type_ids"]) for w in mine] == [w["types"] for w in by_hand]
        starts = [place for w in mine for place in w.places[w.may_start].tolist()]
        assert sorted(starts) == sorted(map(list, offsets))
        for window, hand in zip(mine, by_hand, strict=True):
            places = [[-1, -1] if n is None else list(offsets[n]) for n in hand["numbers"]]
            assert window.places.tolist() == places
    assert several > 10


@pytest.mark.parametrize("beyond", [1, 2, 60])
def test_a_token_just_behind_a_long_window_may_start_an_answer_in_the_next_one(beyond):
    """A window's length decides between windows that see a token, and gives it to none that does not."""
    item = {"id": "x", "question": "a b", "context": " ".join("c" * (384 - 5 + beyond))}
    first, second = windows_of(bert_tokenizer(), [item], max_length=384, stride=128)
    starts = [place for window in (first, second) for place in window.places[window.may_start].tolist()]
    assert sorted(starts) == sorted(map(list, windows_by_hand(item, 384, 128)[1]))


@pytest.mark.parametrize("trained", [True, False])
def test_answers_are_those_of_run_squads_loops(trained, model):
    model, items = (model if trained else new_bert(seed=3)), short_items()
    windows = windows_of(bert_tokenizer(), items, max_length=LENGTH, stride=STRIDE)
    assert answer(model, windows, items, **BEST) == answers_by_hand(model, items)
    few = BEST | {"n_best": 2, "longest": 3}
    assert answer(model, windows, items, **few) == answers_by_hand(model, items, n_best=2, longest=3)


def test_scores_are_those_of_mlqas_script_on_real_answers():
    items = bundled("eval/squad.validation")
    guesses = [" ".join(item["context"].split()[n % 7 : n % 7 + 4]) for n, item in enumerate(items)]
    truths = [item["answers"]["text"][-1] + " The." for item in items]
    for answers in (guesses, truths, [""] * len(items)):
        exact, f1 = scores(answers, items)
        for n, item in enumerate(items):
            texts = item["answers"]["text"]
            assert exact[n] == max(exact_match_score(answers[n], text, "en") for text in texts)
            assert f1[n] == pytest.approx(max(f1_score(answers[n], text, "en") for text in texts))
    assert scores(truths, items)[0].all()


@pytest.mark.parametrize(
    ("found", "truths", "exact", "f1"),
    [
        ("The Denver Broncos!", ["Denver Broncos"], 1, 1),
        ("Denver", ["Carolina", "Denver Broncos"], 0, 2 / 3),
        ("in the city of Denver", ["Denver"], 0, 0.4),
        ("two two", ["two"], 0, 2 / 3),
        ("Paris", ["London"], 0, 0),
    ],
)
def test_case_marks_and_articles_do_not_count_and_f1_is_of_bags_of_words(found, truths, exact, f1):
    measured = scores([found], [{"answers": {"text": truths}}])
    assert (measured[0][0], measured[1][0]) == (exact, pytest.approx(f1))


def test_scores_that_are_no_numbers_give_no_answer(model):
    items = short_items(2)
    windows = windows_of(bert_tokenizer(), items, max_length=LENGTH, stride=STRIDE)
    broken = new_bert()
    torch.nn.init.constant_(broken.qa_outputs.bias, float("nan"))
    assert answer(broken, windows, items, **BEST) == ["", ""]


# -- the jobs ----


def test_the_job_has_both_measures_with_their_errors_whatever_the_batch(tmp_path, folder, manifest, model):
    job = spans()
    found = span_answers.run(job, inputs(tmp_path, folder, [manifest]), CPU)
    exact, f1 = scores(answers_by_hand(model, short_items()), short_items())
    assert found.metrics["exact_match"] == exact.mean() > 0.6, "it learned them"
    assert found.metrics["f1"] == pytest.approx(f1.mean()) and set(found.metrics) == set(job.metrics())
    assert found.standard_errors["f1"] == pytest.approx(f1.std(ddof=1) / ITEMS**0.5)
    assert found.labels == [f"squad: a subset of {ITEMS} items"] and found.metrics["unanswered"] == 0
    for size in (1, 7):
        other = Machine(device="cpu", progress=False, micro_batch=size)
        assert span_answers.run(job, inputs(tmp_path, folder, [manifest]), other) == found


def without_layer(model, block):
    """A BERT of one block less, with the weights of the others."""
    kept = [n for n in range(model.config.num_hidden_layers) if n != block - 1]
    smaller = new_bert(num_hidden_layers=len(kept))
    weights = {}
    for name, value in model.state_dict().items():
        head, layer, rest = name.partition("encoder.layer.")
        if layer:
            number, _, end = rest.partition(".")
            if int(number) not in kept:
                continue
            name = f"{head}{layer}{kept.index(int(number))}.{end}"
        weights[name] = value
    smaller.load_state_dict(weights)
    return smaller


def test_without_a_block_it_answers_as_a_model_that_was_built_without_that_layer(
    tmp_path, folder, manifest, model, narrow
):
    job, items = removal(), short_items()
    found = block_removal.run(job, inputs(tmp_path, folder, [manifest]), CPU)
    whole = span_answers.run(spans(), inputs(tmp_path, folder, [manifest]), CPU)
    assert found.metrics == {"full/accuracy": whole.metrics["exact_match"], "full/f1": whole.metrics["f1"]}
    assert found.standard_errors == {f"full/{k.replace('exact_match', 'accuracy')}": v
                                     for k, v in whole.standard_errors.items()}  # fmt: skip
    assert set(found.metrics) == set(job.metrics()) and "squad: accuracy is exact match" in found.labels
    series = found.series["removal"]
    assert tuple(series.columns) == job.series()["removal"] and series.column("block") == [1, 2, 3]
    for row in series.rows:
        block, accuracy, drop, stderr, f1, f1_drop, f1_stderr = row
        exact, bags = scores(answers_by_hand(without_layer(model, block), items), items)
        assert (accuracy, f1) == (exact.mean(), pytest.approx(bags.mean()))
        assert (drop, f1_drop) == (exact_share(found) - accuracy, found.metrics["full/f1"] - f1)
        assert (stderr, f1_stderr) == tuple(pytest.approx(x.std(ddof=1) / ITEMS**0.5) for x in (exact, bags))
    assert max(series.column("drop")) > 0.1 < max(series.column("f1_drop")), (
        "blocks of a model that learned something matter"
    )


def exact_share(found):
    return found.metrics["full/accuracy"]


def test_a_killed_removal_goes_on_with_the_next_block(tmp_path, folder, manifest, narrow, monkeypatch):
    from paperlm.evaluate import spans as module

    job = removal()
    whole = block_removal.run(job, inputs(tmp_path, folder, [manifest]), CPU)
    path = tmp_path / "work/measured.json"
    done = json.loads(path.read_text())
    assert list(done["done"]) == ["full", "1", "2", "3"]
    del done["done"]["3"]
    write_sealed(path, done["what"], done)
    calls, asked = [], module.answer
    monkeypatch.setattr(module, "answer", lambda *a, **k: calls.append(a) or asked(*a, **k))
    assert block_removal.run(job, inputs(tmp_path, folder, [manifest]), CPU) == whole and len(calls) == 1


def test_names_and_data_follow_from_the_settings():
    jobs = [removal(), removal(items=12), removal(source="local"), removal(max_length=128)]
    assert len({job.job_id for job in jobs}) == 4
    assert [data.dataset for data in removal(source="hub").data()] == ["hub:rajpurkar/squad"]
    assert jobs[0].slug() == "block_removal-bert-large-uncased-whole-word-masking-finetuned-squad-squad"
    for job in (*jobs, spans()):
        assert job_from(json.loads(json.dumps(job.canonical()))).job_id == job.job_id


# -- what does not fit is told, before a job starts where the registry knows it ----

LM = {"tasks": ["arc_easy"], "source": "bundled", "few_shot": 0, "max_length": 48}
WINDOWS = {"text": "bundled:c4_sample", "documents": 2, "window": 8}
UNFIT = [
    (lambda of: spans(of=of), DECODER, r"is a LlamaForCausalLM, which marks no span .* models that do: .*squad"),
    (lambda of: spans(of=of), MASKED, r"is a BertForMaskedLM, which marks no span"),
    (lambda of: removal(of=of), DECODER, r"is a LlamaForCausalLM, which marks no span"),
    (lambda of: LmEval(of=of, **LM), QA, r"is a BertForQuestionAnswering, which predicts no next token; models that"),
    (lambda of: LmEval(of=of, **LM), MASKED, r"is a BertForMaskedLM, which predicts no next token"),
    (lambda of: BlockRemoval(of=of, **TEXT), MASKED, r"is a BertForMaskedLM, which predicts no next token"),
    (lambda of: BlockRemoval(of=of, **TEXT), QA, r"which predicts no next token"),
    (lambda of: GradientNorms(of=of, batches=1, batch=2, **TEXT), QA, r"which predicts no next token"),
    (lambda of: TextPerplexity(of=of, text="bundled:c4_sample", documents=2, chunk=8), QA, r"predicts no next token"),
    (lambda of: StoredPerplexity(of=of, store="plain", **WINDOWS), QA, r"predicts no next token"),
    (lambda of: StoredSpeed(of=of, store="plain", batch=1, window=8), MASKED, r"predicts no next token"),
    (lambda of: PerturbedPerplexity(of=of, absolute=[-3], relative=[None], **WINDOWS), QA, r"predicts no next token"),
]


@pytest.mark.parametrize(("make", "name", "message"), UNFIT)
def test_a_model_with_another_head_than_a_job_needs_is_refused_by_its_registry_entry(make, name, message):
    with pytest.raises(ValidationError, match=message):
        make(HubModel(name=name))


def test_angles_can_be_measured_of_any_of_them():
    for name in (QA, MASKED, DECODER):
        assert AngularDistance(of=HubModel(name=name), documents=2, **TEXT).parents()["of"].name == name


WRONG = [
    ({"few_shot": 2}, r"few_shot: a model that answers by spans takes no worked examples; leave it out"),
    (TEXT, r"no text is read beside the task: leave them out"),
    ({"source": None}, r"source"),
    ({"max_length": None}, r"max_length"),
    ({"task": "squadd"}, r"unknown task 'squadd'; did you mean 'squad'"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_settings_that_squad_has_no_use_for_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        removal(**settings)


def test_a_folder_with_another_head_and_a_length_beyond_its_positions_are_refused(tmp_path, folder, manifest):
    other = save(tmp_path / "decoder", new_model())
    for job, run in ((spans(), span_answers.run), (removal(), block_removal.run)):
        with pytest.raises(JobError, match="LlamaForCausalLM marks no span of a text as an answer; it takes"):
            run(job, inputs(tmp_path, other, [manifest]), CPU)
    with pytest.raises(JobError, match=rf"sees {POSITIONS} tokens at once, max_length is {POSITIONS + 1}: lower it"):
        span_answers.run(spans(max_length=POSITIONS + 1), inputs(tmp_path, folder, [manifest]), CPU)
    with pytest.raises(JobError, match="marks no span"):
        require_spans(new_bert(cls=transformers.BertForMaskedLM), LENGTH)


def test_a_question_that_leaves_no_room_for_its_passage_is_named():
    item = short_items(1)[0] | {"question": "why " * 80}
    with pytest.raises(DataError, match=rf"item {item['id']}: beside its question 96 tokens leave .*raise max_length"):
        windows_of(bert_tokenizer(), [item], max_length=LENGTH, stride=STRIDE)


BROKEN = [
    (lambda items: [{k: v for k, v in items[0].items() if k != "context"}, *items[1:]], r"item 1: no 'context'"),
    (lambda items: [items[0], items[1] | {"answers": {"text": []}}], r"item 2: answers\.text is empty"),
    (lambda items: items[:1], r"1 items; a standard error needs two"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_unusable_items_are_named_before_the_model_is_read(tmp_path, change, message):
    manifest = prepared_items(tmp_path / "items", change(short_items()))
    with pytest.raises(DataError, match=message):
        span_answers.run(spans(), inputs(tmp_path, tmp_path / "no such folder", [manifest]), CPU)
    with pytest.raises(DataError, match=message):
        load_questions(manifest)


# -- from the hub ----


def mirrored(tmp_path, monkeypatch, model, change=lambda weights: None, **entry):
    """What a hub_model job makes of a model in a mirror whose weights `change` altered."""
    folder = save_bert(tmp_path / "mirror/someone/squad", model)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hub = {"name": "someone/squad", "revision": "0123456789ab"}
    about = {"source": "hub", "architecture": "BertForQuestionAnswering", "hub": hub}
    register(monkeypatch, **{"someone/squad": about | entry})
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    manifest = prepare_model_files(ModelData(model="hub:someone/squad"), tmp_path / "data")
    target = tmp_path / "made"
    target.mkdir()
    job = HubModel(name="hub:someone/squad")
    return target, run_hub_model(job, Inputs(data=(manifest,), work=tmp_path, model=target), CPU)


POOLER = {"bert.pooler.dense.weight": torch.ones(48, 48), "bert.pooler.dense.bias": torch.ones(48)}


def test_a_fine_tuned_bert_with_its_pooler_becomes_a_model_that_answers(tmp_path, monkeypatch, model, manifest):
    unused = registry().models[QA.partition(":")[2]].unused_weights
    made, found = mirrored(tmp_path, monkeypatch, model, lambda w: w.update(POOLER), unused_weights=unused)
    assert found.metrics["blocks"] == 3
    answered = span_answers.run(spans(of=HubModel(name="hub:someone/squad")), inputs(tmp_path, made, [manifest]), CPU)
    assert answered.metrics["exact_match"] > 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: [w.pop(f"qa_outputs.{part}") for part in ("weight", "bias")], r"do not fit .*: qa_outputs\.bias"),
        (lambda w: w.update(POOLER), r"do not fit BertForQuestionAnswering: bert\.pooler\.dense\.bias"),
    ],
)
def test_a_checkpoint_without_its_head_or_with_weights_left_over_is_refused(
    tmp_path, monkeypatch, model, change, message
):
    with pytest.raises(JobError, match=message):
        mirrored(tmp_path, monkeypatch, model, change)


def test_a_masked_bert_that_is_declared_to_answer_is_refused(tmp_path, monkeypatch):
    with pytest.raises(JobError, match=r"the files hold a BertForMaskedLM .* the registry declares BertForQuestionAn"):
        mirrored(tmp_path, monkeypatch, new_bert(cls=transformers.BertForMaskedLM))


def test_of_a_commit_whose_first_digits_are_known_the_hub_tells_the_others(monkeypatch):
    import huggingface_hub

    whole = "0123456789ab" + "c" * 28
    answers = {"0123456789ab": whole, "aaaaaaaaaaaa": whole}

    class Api:
        def model_info(self, name, revision):
            return type("Info", (), {"sha": answers[revision]})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert _commit(ModelRepository(name="a/b", revision="0123456789ab")) == whole
    assert _commit(ModelRepository(name="a/b", revision=whole)) == whole
    with pytest.raises(DataError, match=f"revision aaaaaaaaaaaa is commit {whole} on the hub"):
        _commit(ModelRepository(name="a/b", revision="aaaaaaaaaaaa"))
    for short in ("0123456789a", "main", whole + "c"):
        with pytest.raises(ValidationError):
            ModelRepository(name="a/b", revision=short)
