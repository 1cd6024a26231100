"""Jobs that look into a model: names, what they read, and their series against the functions they are made of."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from support_probe import TOKENS, Pretrained, inputs, new_model, save
from support_probe_settings import HUB, OWN_TEXT, TASK, job_of, kinds

from paperlm.data.shards import TokenShards, write_manifest
from paperlm.data.texts import prepare_text, read_documents
from paperlm.errors import DataError, JobError
from paperlm.files import sha256_of, write_sealed
from paperlm.jobs import angular_distance, block_removal, gradient_norms, output_variance
from paperlm.jobs.angular_distance import AngularDistance
from paperlm.jobs.base import Machine
from paperlm.jobs.block_removal import BlockRemoval
from paperlm.jobs.gradient_norms import GradientNorms
from paperlm.jobs.hub_model import HubModel
from paperlm.jobs.output_variance import OutputVariance
from paperlm.jobs.pretrain import Pretrain
from paperlm.models.folder import load_model, load_tokenizer
from paperlm.probe import text as text_probe
from paperlm.probe.angular import angular_distances, scaled
from paperlm.probe.gradients import gradient_norms as norms_of
from paperlm.probe.losses import sequence_losses
from paperlm.probe.removal import removed
from paperlm.probe.variance import output_variances
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.run import Maker

RUN = {AngularDistance: angular_distance, OutputVariance: output_variance, BlockRemoval: block_removal}
RUN |= {GradientNorms: gradient_norms}
CPU = Machine(device="cpu", progress=False)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Prepared validation tokens of sequences of different lengths, two shards of them."""
    folder = tmp_path_factory.mktemp("tokens")
    lengths = np.array([32, 20, 2, 32, 7, 15, 32, 5, 3])
    ids = np.random.default_rng(0).integers(2, 1024, (len(lengths), 32), dtype=np.uint16)
    ids[np.arange(32) >= lengths[:, None]] = 0
    shards = []
    for number, rows in enumerate((ids[:4], ids[4:])):
        path = folder / f"validation-{number:05d}.npy"
        np.save(path, rows)
        shards.append({"file": path.name, "rows": len(rows), "sha256": sha256_of(path)})
    validation = {"shards": shards, "rows": len(ids), "tokens": int(lengths.sum())}
    return write_manifest(folder, {"data_id": "tokens", "pad_id": 0, "validation": validation})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with weights in bfloat16, as pure bfloat16 training leaves them."""
    model = new_model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)
    return save(tmp_path_factory.mktemp("model"), model.bfloat16())


@pytest.fixture(scope="module")
def batch(tokens):
    shards = TokenShards(tokens, "validation")
    ids = torch.from_numpy(shards.rows(np.arange(6)))
    assert (ids == shards.pad_id).any()
    return ids, (ids != shards.pad_id).long()


@pytest.fixture(scope="module")
def model(folder):
    """The same model as the jobs see it: values of bfloat16, computed in float32."""
    found = load_model(folder).float()
    assert load_model(folder, head="own").dtype == torch.bfloat16
    return found


def do(job, tmp_path, folder, data, machine=CPU):
    return RUN[type(job)].run(job, inputs(tmp_path, folder, data), machine)


def overflowing():
    """Block 2 leaves infinity."""
    model = new_model()
    with torch.no_grad():
        for p in model.model.layers[1].mlp.parameters():
            p.fill_(1e30)
    return model


def table(series):
    return {name: np.array(series.column(name), dtype=float) for name in series.columns if name != "tensor"}


def test_angular_distance_stores_every_pair_of_the_triangle(tmp_path, folder, tokens, model, batch):
    found = do(job_of(AngularDistance), tmp_path, folder, [tokens])
    truth = angular_distances(model, [batch])
    rows = found.series["angular"].rows
    assert [row[:2] for row in rows] == [[1, 1], [1, 2], [1, 3], [2, 1], [2, 2], [3, 1]]
    for block, n, *values in rows:
        expected = [a[block - 1, n - 1] for a in (truth.raw, scaled(truth.raw), truth.raw_last)]
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert found.outcome == "measured" and found.metrics == {"tokens": truth.tokens, "documents": 6}


def test_output_variance_stores_both_definitions(tmp_path, folder, tokens, model, batch):
    found = table(do(job_of(OutputVariance), tmp_path, folder, [tokens]).series["variance"])
    truth = output_variances(model, [batch])
    assert found["block"].tolist() == [1, 2, 3]
    np.testing.assert_allclose(found["var_tok"], truth.per_token, rtol=1e-5)
    np.testing.assert_allclose(found["var_all"], truth.overall, rtol=1e-5)


def test_gradient_norms_are_means_over_the_batches_in_order(tmp_path, folder, tokens, model, batch):
    result = do(job_of(GradientNorms), tmp_path, folder, [tokens])
    found = table(result.series["gradient_norms"])
    ids, mask = batch
    single = [norms_of(model, [[(ids[rows], mask[rows])]]) for rows in (slice(0, 3), slice(3, 6))]
    np.testing.assert_allclose(found["norm"], np.mean([s.blocks for s in single], 0), rtol=1e-4)
    np.testing.assert_allclose(found["input_norm"], np.mean([s.inputs for s in single], 0), rtol=1e-4)
    tensors = {(block, name): norm for block, name, norm in result.series["tensors"].rows}
    assert len(tensors) == 3 * 7
    assert tensors[2, "mlp.up_proj"] == pytest.approx(np.mean([s.tensors[1]["mlp.up_proj"] for s in single]), rel=1e-4)
    assert result.metrics["loss"] == pytest.approx(np.mean([s.loss for s in single]), rel=1e-5)


def test_block_removal_has_the_perplexity_whole_and_without_each_block(tmp_path, folder, tokens, model, batch):
    found = do(job_of(BlockRemoval), tmp_path, folder, [tokens])
    whole = math.exp(sequence_losses(model, [batch]).loss_true())
    assert found.metrics == {"full/perplexity": pytest.approx(whole, rel=1e-5)}
    for block, *nothing, perplexity in found.series["removal"].rows:
        with removed(model, block):
            assert perplexity == pytest.approx(math.exp(sequence_losses(model, [batch]).loss_true()), rel=1e-5)
        assert nothing == [None, None, None] and abs(perplexity / whole - 1) > 1e-3
    assert found.series["removal"].column("block") == [1, 2, 3]


def test_a_killed_block_removal_goes_on_with_the_next_block(tmp_path, folder, tokens, monkeypatch):
    whole = do(job_of(BlockRemoval), tmp_path, folder, [tokens])
    path = tmp_path / "work/measured.json"
    done = json.loads(path.read_text())
    assert list(done["done"]) == ["full", "1", "2", "3"]
    del done["done"]["3"]
    write_sealed(path, done["what"], done)
    from paperlm.probe import losses

    calls = []
    measure = losses.sequence_losses
    monkeypatch.setattr(losses, "sequence_losses", lambda *a: calls.append(a) or measure(*a))
    assert do(job_of(BlockRemoval), tmp_path, folder, [tokens]) == whole
    assert len(calls) == 1


@kinds
def test_the_micro_batch_changes_nothing_but_rounding(kind, tmp_path, folder, tokens):
    (tmp_path / "other").mkdir()
    found = [
        do(job_of(kind), path, folder, [tokens], Machine(device="cpu", progress=False, micro_batch=size))
        for path, size in ((tmp_path, 2), (tmp_path / "other", 5))
    ]
    for name, series in found[0].series.items():
        for column, values in table(series).items():
            np.testing.assert_allclose(table(found[1].series[name])[column], values, rtol=1e-4, atol=1e-7)


@kinds
def test_more_sequences_than_there_are_is_an_error_that_says_how_many(kind, tmp_path, folder, tokens):
    there = len(TokenShards(tokens, "validation"))
    settings = {"batches": there, "batch": 2} if kind is GradientNorms else {"documents": 2 * there}
    with pytest.raises(JobError, match=rf"{2 * there} sequences are asked for, its data has {there}.*at most so many"):
        do(job_of(kind, **settings), tmp_path, folder, [tokens])


@pytest.mark.parametrize("kind", [AngularDistance, OutputVariance, GradientNorms], ids=lambda kind: kind.kind)
def test_a_model_whose_streams_overflow_gives_no_number_but_a_reason(kind, tmp_path, tokens):
    found = do(job_of(kind), tmp_path, save(tmp_path / "model", overflowing()), [tokens])
    assert found.outcome == "blocked" and not found.series
    assert "not finite" in found.reason and (kind is GradientNorms or "entering block 3" in found.reason)


def test_without_a_finite_perplexity_there_is_none(tmp_path, tokens):
    found = do(job_of(BlockRemoval), tmp_path, save(tmp_path / "model", overflowing()), [tokens])
    assert found.metrics == {"full/perplexity": None}
    assert [value is None for value in found.series["removal"].column("perplexity")] == [True, False, True]


@kinds
def test_a_model_from_elsewhere_reads_a_text_with_its_own_tokenizer_cut_and_padded(kind, tmp_path, folder):
    job = job_of(kind, of=HubModel(name=HUB), **OWN_TEXT)
    (settings,) = job.data()
    manifest = prepare_text(settings, tmp_path / "text")
    texts = read_documents(manifest)
    assert len(texts) == 6
    found = do(job, tmp_path, folder, [manifest])
    tokenizer = load_tokenizer(folder)
    rows = [tokenizer.encode(text)[:16] for text in texts]
    model = load_model(folder).float()
    losses = [sequence_losses(model, [(torch.tensor([row]), torch.ones(1, len(row)))]) for row in rows]
    if kind is BlockRemoval:
        mean = sum(x.sums.sum() for x in losses) / sum(x.counts.sum() for x in losses)
        assert found.metrics["full/perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
    else:
        per_sequence = 1 if kind is AngularDistance else 0
        assert found.metrics["tokens"] == sum(len(row) - per_sequence for row in rows)


def test_a_model_whose_examples_begin_with_a_token_reads_another_text_behind_the_same(tmp_path, folder, monkeypatch):
    job = job_of(OutputVariance, **OWN_TEXT)
    manifest = prepare_text(job.data()[0], tmp_path / "text")
    tokenizer = load_tokenizer(folder)
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    rows = [tokenizer.encode(text) for text in read_documents(manifest)]
    for example, wanted in (
        ("split", [row[:16] for row in rows]),
        ("packed_bos", [[first, *row[:15]] for row in rows]),
    ):
        monkeypatch.setattr(text_probe, "root", lambda job, example=example: SimpleNamespace(example=example))
        ids, mask = text_probe._own_text(job, SimpleNamespace(models={"of": folder}, data=(manifest,)))
        assert [row[real.astype(bool)].tolist() for row, real in zip(ids, mask, strict=True)] == wanted


def test_an_altered_document_is_found(tmp_path):
    (settings,) = job_of(OutputVariance, of=HubModel(name=HUB), **OWN_TEXT).data()
    manifest = prepare_text(settings, tmp_path)
    assert json.loads(manifest.read_text())["licence"].startswith("ODC-BY")
    path = tmp_path / "documents.jsonl"
    path.write_text(path.read_text() + " ")
    with pytest.raises(DataError, match=r"documents\.jsonl: missing, truncated or altered; delete the folder"):
        read_documents(manifest)


def test_more_documents_than_a_text_has_is_refused(tmp_path):
    (settings,) = job_of(OutputVariance, of=HubModel(name=HUB), documents=500, **OWN_TEXT).data()
    with pytest.raises(DataError, match="has 219 validation documents, not 500"):
        prepare_text(settings, tmp_path)


@kinds
def test_a_bert_has_angles_and_variances_and_where_a_decoder_is_needed_it_is_refused(kind, tmp_path, tokens):
    bert = save(tmp_path / "bert", new_model(transformers.BertForMaskedLM))
    if kind in (AngularDistance, OutputVariance):
        assert do(job_of(kind), tmp_path, bert, [tokens]).outcome == "measured"
    else:
        with pytest.raises(JobError, match="BertForMaskedLM predicts no next token"):
            do(job_of(kind), tmp_path, bert, [tokens])


def test_block_removal_has_the_accuracy_of_the_lm_eval_job_whole_and_without_each_block(tmp_path, folder, tokens):
    pytest.importorskip("paperlm.evaluate.harness")
    from paperlm.data.items import prepare_any
    from paperlm.evaluate.harness import evaluate

    job = job_of(BlockRemoval, **TASK)
    (own, items) = job.data()
    assert own == Pretrained().token_data() and job.evaluation().kind == "lm_eval"
    manifest = prepare_any(items, tmp_path / "items")
    found = do(job, tmp_path, folder, [tokens, manifest])

    model, tokenizer = load_model(folder).float(), load_tokenizer(folder)
    options = {"few_shot": 0, "max_length": 64, "batch_size": 4, "limit": 10, "progress": False}
    whole = evaluate(model, tokenizer, ["arc_easy"], {"arc_easy": manifest}, **options)
    assert found.metrics["full/accuracy"] == whole.metrics["arc_easy/acc"]
    assert found.standard_errors == {"full/accuracy": whole.standard_errors["arc_easy/acc"]}
    assert found.versions == whole.versions and "arc_easy: 10 items" in found.labels
    with removed(model, 2):
        without = evaluate(model, tokenizer, ["arc_easy"], {"arc_easy": manifest}, **options)
    block, accuracy, drop, stderr, _ = found.series["removal"].rows[1]
    assert (block, accuracy, stderr) == (2, without.metrics["arc_easy/acc"], without.standard_errors["arc_easy/acc"])
    assert drop == whole.metrics["arc_easy/acc"] - accuracy


def test_a_drop_is_the_accuracy_that_is_lost_without_the_block(tmp_path, folder, tokens, monkeypatch):
    from paperlm.data.items import prepare_any
    from paperlm.evaluate import harness

    accuracies = iter([0.625, 0.25, 0.875, 0.5])  # whole, then without blocks 1, 2 and 3
    found = lambda value: harness.Evaluation(  # noqa: E731
        metrics={"arc_easy/acc": value},
        standard_errors={"arc_easy/acc": value / 8},
        versions={},
        items={"arc_easy": 10},
        cut={"arc_easy": 0.0},
    )
    monkeypatch.setattr(harness, "evaluate", lambda *arguments, **options: found(next(accuracies)))
    job = job_of(BlockRemoval, **TASK)
    result = do(job, tmp_path, folder, [tokens, prepare_any(job.data()[1], tmp_path / "items")])
    series = result.series["removal"]
    assert result.metrics["full/accuracy"] == 0.625 and result.standard_errors == {"full/accuracy": 0.625 / 8}
    assert series.column("accuracy") == [0.25, 0.875, 0.5]
    assert series.column("drop") == [0.375, -0.25, 0.125]
    assert series.column("stderr") == [0.25 / 8, 0.875 / 8, 0.5 / 8]


PRETRAIN = {"size": "toy", "hidden_size": 16, "intermediate_size": 24, "n_heads": 2, "n_layers": 2, "vocab_size": 1024}
PRETRAIN |= {"norm": {"name": "pre_ln"}, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.02}
PRETRAIN |= {"embed_init_std": 0.02, "zero_last_embedding_row": False, "optimizer": "adam", "adam_betas": (0.9, 0.999)}
PRETRAIN |= {"adam_eps": 1e-8, "weight_decay": 0.0, "grad_clip": 0.0, "peak_lr": 0.01, "warmup_fraction": 0.1}
PRETRAIN |= {"final_lr_fraction": 0.1, "steps": 4, "global_batch": 4, "loss_group": 4, "numerics": "fp32", "seed": 0}


def test_from_data_to_record_the_whole_model_has_the_validation_perplexity_of_its_training(tmp_path):
    pre = Pretrain(**PRETRAIN | TOKENS | {"eval_every": 4})
    places = Places(root=tmp_path, scale="smoke")
    maker = Maker(places=places, machine=CPU, keep={pre.job_id: (0, 2)})
    maker.prepare(pre.token_data())
    there = len(TokenShards(tmp_path / places.data(pre.token_data()), "validation"))
    states = [OutputVariance(of=pre, at=at, documents=there) for at in ("init", 2, "end")]
    jobs = [BlockRemoval(of=pre, documents=there), *states]
    for job in jobs:
        maker.with_parents(job)
    trained = read_record(tmp_path / places.made(pre))
    whole, *variances = (read_record(tmp_path / places.made(job)) for job in jobs)
    assert whole.metrics["full/perplexity"] == pytest.approx(trained.metrics["ppl_true"], rel=1e-6)
    assert len({tuple(record.series["variance"].column("var_tok")) for record in variances}) == 3
