"""The bundled tokenizers: where their vocabulary is from, and what they make of texts."""

import hashlib

import hypothesis
import numpy as np
import pytest
from support_c4 import BPE, c4_texts
from tokenizers import Tokenizer

from paperlm.data.prepare import prepare
from paperlm.data.registry import HERE, tokenizer_entry
from paperlm.data.shards import load_manifest
from paperlm.data.tokenizer import TextTokenizer, examples, train_bpe
from paperlm.errors import DataError


def test_bpe1024_comes_out_bit_equal_when_trained_again_on_the_training_documents(tmp_path):
    train_bpe(c4_texts("train"), 1024).save(str(tmp_path / "again.json"), pretty=False)
    assert (tmp_path / "again.json").read_bytes() == BPE.read_bytes()


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(hypothesis.strategies.text().filter(lambda text: "<pad>" not in text))
@hypothesis.example("<s>struck</s> \r\n\t \u00a0\u2028\u200d\ufeff\x00 e\u0301 \u00e9 👩‍👩‍👧 𝔘𝔫𝔦 العربية 漢字 {\\<|>}")
def test_bpe1024_gives_every_text_back(text):
    tokenizer = TextTokenizer("bpe1024")
    (ids,) = tokenizer.encode([text])
    assert ids[-1] == 1 and ids.count(1) == 1 + text.count("</s>") and 0 not in ids
    assert tokenizer.inner.decode(ids[:-1], skip_special_tokens=False) == text


def test_t5_gives_the_ids_of_its_documentation_one_eos_no_sentinel_and_the_truncation_of_the_authors_call():
    tokenizer, texts = TextTokenizer("t5"), c4_texts("train")[::10]
    assert (tokenizer.pad, tokenizer.eos) == (0, 1)
    known = tokenizer.encode(["translate English to German: The house is wonderful.", ""])
    assert known == [[13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, 1], [1]]
    encoded = tokenizer.encode(texts)
    assert len(encoded) == len(texts) == 196
    assert all(ids[-1] == 1 and ids.count(1) == 1 and min(ids) > 0 and max(ids) < 32000 for ids in encoded)
    raw = Tokenizer.from_file(str(HERE / "tokenizers/t5/tokenizer.json"))
    raw.enable_truncation(256)  # their call lets the tokenizer append eos
    rows = [row for ids in encoded for row in examples(ids, 256, "truncate")]
    assert rows == [e.ids for e in raw.encode_batch(texts, add_special_tokens=True)] != encoded


def test_t5_reads_a_newline_as_a_blank_and_braces_backslash_and_less_as_unknown():
    tokenizer = TextTokenizer("t5")
    newline, blank, *others = tokenizer.encode(["one\ntwo", "one two", "{", "}", "\\", "<"])
    assert newline == blank and 2 not in blank
    assert others == [[3, 2, 1]] * 4 and tokenizer.inner.id_to_token(2) == "<unk>"
    odd = {piece for piece in tokenizer.inner.get_vocab() if set(piece) & set("\n{}\\<")}
    assert odd == {"<pad>", "</s>", "<unk>", *(f"<extra_id_{n}>" for n in range(100))}


SENTENCEPIECE = "41d0d4d5694b691de26d958073c3b7f0eee9ea1b7c7196bf486cb8f7f98012db"
"Of the ids that SentencePiece 0.2.3 gives with Mistral's own file, which is not here, and 2 behind each text."


def test_mistrals_pieces_come_out_as_sentencepiece_has_them():
    tokenizer, found = TextTokenizer("mistral_v1"), hashlib.sha256()
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    for ids in tokenizer.encode([*c4_texts("train"), *c4_texts("validation")]):
        found.update(np.asarray(ids, dtype="<u2").tobytes())
    assert found.hexdigest() == SENTENCEPIECE
    known = {
        "The house is wonderful.": [415, 2134, 349, 8590, 28723],
        " two  blanks\n\ttab": [28705, 989, 28705, 843, 3750, 13, 12, 4252],
        "漢字 👩 𝔘": [28705, 233, 191, 165, 29031, 28705, 243, 162, 148, 172, 28705, 243, 160, 151, 155],
        "{\\<|>}": [2532, 28789, 28766, 28767, 28752],
        "": [],
    }
    assert tokenizer.encode(list(known)) == [[*ids, 2] for ids in known.values()]
    assert [tokenizer.inner.decode(ids) for ids in known.values()] == list(known)


def test_packed_rows_begin_with_the_bos_of_a_tokenizer_that_has_one_and_texts_end_with_its_eos(tmp_path):
    settings = {"dataset": "bundled:c4_sample", "tokenizer": "mistral_v1", "vocab_size": 32000, "seq_len": 64}
    settings |= {"example": "packed_bos", "train_examples": 150, "validation_tokens": 3000}
    manifest = load_manifest(prepare(settings, tmp_path))
    raw = Tokenizer.from_file(str(HERE / "tokenizers/mistral_v1/tokenizer.json"))
    texts = raw.encode_batch(c4_texts("train"), add_special_tokens=False)
    row = [number for one in texts for number in (*one.ids, 2)]
    stored = np.concatenate([np.load(path) for path in sorted(tmp_path.glob("train-*.npy"))]).tolist()
    assert stored == [[1, *row[k : k + 63]] for k in range(0, 63 * len(stored), 63)] and len(stored) > 20
    assert (manifest["bos_id"], manifest["eos_id"]) == (1, 2)


@pytest.mark.parametrize("name", ["bpe1024", "t5"])
def test_a_text_that_spells_the_padding_token_goes_on_after_it(name):
    """Its label is left out of the loss, as by the authors' call; the text around it is not."""
    (ids,) = TextTokenizer(name).encode(["an HTML page may say <pad> in its text"])
    assert ids.count(0) == 1 and 0 not in ids[:3] and 0 not in ids[-3:]


def test_a_special_token_that_has_no_id_is_refused(monkeypatch):
    entry = tokenizer_entry("bpe1024")
    for changes, named in (({"eos": "<end>"}, "'<end>'"), ({"vocab_size": 1}, "'</s>'")):
        monkeypatch.setattr(
            "paperlm.data.tokenizer.tokenizer_entry", lambda name, new=changes: entry.model_copy(update=new)
        )
        with pytest.raises(
            DataError, match=f"special token {named} is not among the {changes.get('vocab_size', 1024)} ids"
        ):
            TextTokenizer("bpe1024")
