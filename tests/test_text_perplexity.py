"""Perplexity on documents packed into chunks: the packing by hand, the numbers against the model written out."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies
from support import smoke_run
from support_probe import new_model, save

from paperlm.data.chunks import packed_chunks
from paperlm.data.texts import prepare_text
from paperlm.errors import DataError, JobError, SpecError
from paperlm.jobs import parse_job
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.text_perplexity import TextPerplexity, run
from paperlm.models.folder import load_tokenizer, save_model, transformers_tokenizer
from paperlm.models.llama import PaperLlamaForCausalLM

BOS, EOS = 0, 9
LENGTHS = strategies.lists(strategies.integers(1, 14), min_size=1, max_size=30)


# -- packing ----


def test_three_documents_of_which_one_is_too_long_are_packed_as_written_here():
    """Chunks of 8: the second document, of 8 ids, has no room behind a BOS; the third does not fit behind the first."""
    documents = [[1, 2, 3, EOS], [4] * 7 + [EOS], [5, 6, 7, EOS]]
    found = packed_chunks(documents, 8, BOS, "drop")
    assert found.ids == [[BOS, 1, 2, 3, EOS], [BOS, 5, 6, 7, EOS]]
    assert (found.documents, found.longer) == (3, 1)


def test_a_document_that_fills_the_chunk_to_the_last_id_goes_behind_the_one_before_it():
    documents = [[1, 2, EOS], [3, 4, 5, EOS], [6, EOS]]
    assert packed_chunks(documents, 8, BOS, "drop").ids == [[BOS, 1, 2, EOS, 3, 4, 5, EOS], [BOS, 6, EOS]]
    assert packed_chunks(documents, 7, BOS, "drop").ids == [[BOS, 1, 2, EOS], [BOS, 3, 4, 5, EOS, 6, EOS]]


def test_a_document_that_is_cut_goes_on_in_chunks_of_its_own_and_its_end_takes_others_in():
    found = packed_chunks([[1, EOS], [2] * 9 + [EOS], [3, EOS]], 6, BOS, "split")
    assert found.ids == [[BOS, 1, EOS], [BOS, *[2] * 5], [BOS, *[2] * 4, EOS], [BOS, 3, EOS]]
    assert found.longer == 1


@hypothesis.given(LENGTHS, strategies.sampled_from(["drop", "split"]))
def test_chunks_are_whole_documents_in_order_and_none_is_closed_before_it_has_to_be(lengths, longer):
    documents = [[100 * n + k for k in range(1, length)] + [EOS] for n, length in enumerate(lengths, start=1)]
    kept = [ids for ids in documents if len(ids) <= 9 or longer == "split"]
    if not kept:
        with pytest.raises(DataError, match=r"none of \d+ documents fits into a chunk of 10 tokens: raise chunk"):
            packed_chunks(documents, 10, BOS, longer)
        return
    found = packed_chunks(documents, 10, BOS, longer)
    assert all(chunk[0] == BOS and 1 < len(chunk) <= 10 for chunk in found.ids)
    assert [i for chunk in found.ids for i in chunk[1:]] == [i for ids in kept for i in ids]
    assert found.longer == sum(length > 9 for length in lengths) and found.documents == len(lengths)
    if longer == "drop":
        assert all(chunk[-1] == EOS for chunk in found.ids), "no document is broken"
        for chunk, following in zip(found.ids, found.ids[1:], strict=False):
            assert len(chunk) + following.index(EOS) > 10, "the next document had no room"


# -- the job ----

DOCUMENTS, CHUNK = 40, 250
QUIET = Machine(device="cpu", progress=False)


def job(**changes: Any) -> TextPerplexity:
    fields = {"of": smoke_run(), "text": "bundled:c4_sample", "documents": DOCUMENTS, "chunk": CHUNK}
    return TextPerplexity.model_validate(fields | changes)


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    return prepare_text(job().data()[0], tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """A decoder of this project at weights so large that losses differ from chunk to chunk."""
    torch.manual_seed(0)
    shape = {"vocab_size": 1024, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    config = PaperLlamaForCausalLM.config_class(**shape, num_attention_heads=4, initializer_range=0.3)
    return save(tmp_path_factory.mktemp("decoder"), PaperLlamaForCausalLM(config))


def measured(made: TextPerplexity, model: Path, documents: Path, machine: Machine = QUIET) -> Any:
    return run(made, Inputs(data=(documents,), models={"of": model}, work=model), machine)


def written_out(model: Path, documents: Path, bos: int, longer: str = "drop") -> list[tuple[int, float]]:
    """(predicted tokens, summed loss) of each chunk, in float64, one chunk at a time, from the text on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = (documents.parent / "documents.jsonl").read_text().splitlines()
    texts = [[*tokenizer.encode(json.loads(x)["text"], add_special_tokens=False).ids, 1] for x in lines]
    chunks, open_ = [], [bos]
    for ids in texts:
        pieces = [ids[i : i + CHUNK - 1] for i in range(0, len(ids), CHUNK - 1)]
        for piece in pieces if len(pieces) == 1 or longer == "split" else []:
            if len(open_) + len(piece) > CHUNK:
                chunks, open_ = [*chunks, open_], [bos]
            open_ = open_ + piece
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model).double().eval()
    found = []
    for ids in [*chunks, open_]:
        with torch.no_grad():
            logs = loaded(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found.append((len(ids) - 1, -sum(float(logs[t, ids[t + 1]]) for t in range(len(ids) - 1))))
    return found


@pytest.mark.parametrize("longer", ["drop", "split"])
def test_the_loss_is_the_mean_over_all_tokens_of_all_chunks_but_their_first(decoder, documents, longer):
    found = measured(job(longer=longer), decoder, documents)
    truth = written_out(decoder, documents, bos=1, longer=longer)
    tokens, total = sum(n for n, _ in truth), sum(x for _, x in truth)
    assert found.metrics["tokens"] == tokens and found.metrics["chunks"] == len(truth) > 3
    assert found.metrics["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    of_means = sum(x / n for n, x in truth) / len(truth)
    assert abs(of_means / found.metrics["loss"] - 1) > 1e-4, "which a mean of the chunks' means is not"
    assert [row[:2] for row in found.series["chunks"].rows] == [[i, n] for i, (n, _) in enumerate(truth)]
    assert [row[2] for row in found.series["chunks"].rows] == pytest.approx([x for _, x in truth], rel=1e-5)


def test_documents_that_do_not_fit_are_counted_and_said(decoder, documents):
    dropped, cut = (measured(job(longer=longer), decoder, documents) for longer in ("drop", "split"))
    count = dropped.metrics["documents_longer"]
    assert 0 < count < DOCUMENTS == dropped.metrics["documents"] == cut.metrics["documents"]
    assert f"{count} of {DOCUMENTS} documents do not fit into {CHUNK} tokens and are left out" in dropped.labels
    assert f"{count} of {DOCUMENTS} documents do not fit into {CHUNK} tokens and are cut" in cut.labels
    assert cut.metrics["tokens"] > dropped.metrics["tokens"]


def test_the_standard_error_is_that_of_leaving_chunks_out_one_at_a_time(decoder, documents):
    """The jackknife, another way to the same error of a ratio."""
    found = measured(job(longer="split"), decoder, documents)
    counts, sums = (np.array(found.series["chunks"].column(name)) for name in ("tokens", "summed_loss"))
    each = (sums.sum() - sums) / (counts.sum() - counts)
    jackknife = math.sqrt((len(each) - 1) / len(each) * ((each - each.mean()) ** 2).sum())
    assert found.standard_errors["loss"] == pytest.approx(jackknife, rel=0.05)
    assert found.standard_errors["perplexity"] == pytest.approx(found.metrics["perplexity"] * jackknife, rel=0.05)


def test_chunks_of_one_pass_do_not_see_each_other_or_their_padding(decoder, documents):
    one, all_ = (
        measured(job(), decoder, documents, Machine(device="cpu", progress=False, micro_batch=n)) for n in (1, 64)
    )
    columns = [found.series["chunks"].column("summed_loss") for found in (one, all_)]
    assert columns[0] == pytest.approx(columns[1], rel=1e-5)


def test_a_bos_of_its_own_stands_at_each_chunks_head_and_its_absence_is_said(decoder, documents, tmp_path):
    plain = measured(job(), decoder, documents)
    assert "its tokenizer has no BOS: each chunk begins with its EOS" in plain.labels
    tokenizer = transformers_tokenizer("bpe1024", 64)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)
    save_model(tmp_path / "bos", transformers.AutoModelForCausalLM.from_pretrained(decoder), tokenizer)
    assert load_tokenizer(tmp_path / "bos").bos_token_id == 7
    found = measured(job(), tmp_path / "bos", documents)
    assert not any("BOS" in label for label in found.labels)
    truth = written_out(tmp_path / "bos", documents, bos=7)
    assert found.metrics["loss"] == pytest.approx(sum(x for _, x in truth) / sum(n for n, _ in truth), rel=1e-6)
    assert found.metrics["loss"] != plain.metrics["loss"]


def test_a_model_of_another_architecture_is_measured_too(documents, tmp_path):
    folder = save(tmp_path, new_model(max_position_embeddings=256, initializer_range=0.3))
    found, truth = measured(job(), folder, documents), written_out(folder, documents, bos=1)
    assert found.metrics["loss"] == pytest.approx(sum(x for _, x in truth) / sum(n for n, _ in truth), rel=1e-6)


def test_a_tokenizer_that_ends_no_text_is_refused(documents, tmp_path):
    tokenizer = transformers_tokenizer("bpe1024", 64)
    tokenizer.eos_token = None
    save_model(tmp_path, new_model(), tokenizer)
    with pytest.raises(JobError, match="its tokenizer has no EOS, which stands behind each document"):
        measured(job(), tmp_path, documents)


def test_losses_that_are_no_numbers_give_no_number(documents, tmp_path):
    model = new_model(max_position_embeddings=256)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    found = measured(job(), save(tmp_path, model), documents)
    assert found.outcome == "blocked" and "no finite numbers" in found.reason and not found.metrics


def test_another_architecture_has_no_quantized_cache(documents, tmp_path):
    with pytest.raises(JobError, match="kv_cache is of this project's decoder, and this is another architecture"):
        measured(job(kv_cache={"kv_bits": 4}), save(tmp_path, new_model()), documents)


def test_fewer_bits_of_keys_and_values_change_the_losses_and_three_change_them_more_than_four(decoder, documents):
    """As the same folder with the cache in its own configuration; the BOS of the three bits at four as published."""
    plain, four, three = (
        measured(job(kv_cache=cache), decoder, documents) for cache in (None, {"kv_bits": 4}, {"kv_bits": 3})
    )
    exact, *rough = (np.array(found.series["chunks"].column("summed_loss")) for found in (plain, four, three))
    moved = [np.abs(one - exact).sum() for one in rough]
    assert 0 < 2 * moved[0] < moved[1] and four.metrics["tokens"] == three.metrics["tokens"] == plain.metrics["tokens"]


def test_a_cache_is_that_of_the_models_configuration(decoder, documents, tmp_path):
    shutil.copytree(decoder, tmp_path / "own")
    config = tmp_path / "own/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"kv_cache": {"kv_bits": 3, "mapping": "minmax"}}))
    own = measured(job(), tmp_path / "own", documents)
    given = measured(job(kv_cache={"kv_bits": 3, "mapping": "minmax"}), decoder, documents)
    assert own.metrics == given.metrics != measured(job(kv_cache={"kv_bits": 3}), decoder, documents).metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "bundled:c4_sampel"}, "unknown dataset 'c4_sampel'; did you mean 'c4_sample'"),
        ({"text": "bundled:arc_easy"}, "is a set of items, no text"),
        ({"chunk": 2}, "chunk"),
        ({"documents": 0}, "documents"),
        ({"at": 4}, "at: 4: .* has states 0 to 3 beside its end"),
        ({"kv_cache": {"kv_bits": 5}}, "kv_bits"),
        ({"kv_cache": {"kv_bit": 4}}, "kv_cache"),
        ({"longer": "cut"}, "longer"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused_before_it_starts(changes, message):
    fields = {"of": smoke_run().canonical(), "text": "bundled:c4_sample", "documents": 3, "chunk": 64, **changes}
    with pytest.raises(SpecError, match=message):
        parse_job({"kind": "text_perplexity", **fields})


def test_a_cache_is_written_out_in_the_name_and_in_the_settings():
    made = job(kv_cache={"kv_bits": 3})
    assert made.kv_cache == {"q_bits": 16, "kv_bits": 3, "first_bits": 4, "mapping": "symmetric"}
    assert made.slug().startswith("text_perplexity-q16_kv3-llama_71m") and job().slug().startswith(
        "text_perplexity-llama"
    )


def test_the_published_text_is_the_first_validation_file_in_its_order():
    """Hub text that is shuffled would give another file's documents."""
    from paperlm.data.registry import dataset_entry

    plain, shuffled = (dataset_entry(f"hub:allenai/{name}")[1].hub for name in ("c4_in_order", "c4"))
    assert (
        plain.shuffle == {} and shuffled.shuffle and plain.name == shuffled.name and plain.revision == shuffled.revision
    )


def test_so_many_chunks_go_at_once_as_their_logits_have_room(decoder, documents, monkeypatch):
    from paperlm.probe import text

    vocab, rows = PaperLlamaForCausalLM.config_class.from_pretrained(decoder).vocab_size, []
    monkeypatch.setattr(text, "LOGITS", {"cpu": 3 * vocab * CHUNK + 1})
    forward = PaperLlamaForCausalLM.forward

    def noted(self, input_ids, **keywords):
        rows.append(len(input_ids))
        return forward(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(PaperLlamaForCausalLM, "forward", noted)
    measured(job(longer="split"), decoder, documents)
    assert len(rows) > 1 and rows[:-1] == [3] * (len(rows) - 1) and 0 < rows[-1] <= 3
