"""How requests reach lm-evaluation-harness faster than by its own way, and are the same."""

from __future__ import annotations

import pytest
from jinja2 import Environment
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import env
from support_items import prepared, small_model
from support_scorer import Scorer
from tokenizers.processors import TemplateProcessing

from paperlm.evaluate import harness
from paperlm.models.folder import transformers_tokenizer

PAIRS = [
    ("Q: 1 + 1?\nA:", " 2"), ("Q: 1 + 1?\nA:", " three"), ("Q: 1 + 1?\nA: \n ", "2"), ("", " an option alone"),
    ("</s>begins with the special token", " of its beginning"), ("Q: 1 + 1?\nA:", " 2"), ("  blanks before", " it"),
    ("naïve Ünicode… 日本", " 語"), ("\n", "only blanks"), ("one", "word"),
]  # fmt: skip


def asking(pairs: list[tuple[str, str]]) -> list[Instance]:
    return [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0, metadata=("piqa", n, 1))
        for n, pair in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def told(monkeypatch):
    """What is handed on to the model, call by call."""
    found = []

    def tell(lm, asked, **_):
        found.append(asked)
        return [(0.0, False)] * len(asked)

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", tell)
    monkeypatch.setattr(harness.CountingLM, "_loglikelihood_tokens", tell)
    return found


def ours(model, tokenizer):
    return harness.CountingLM(model, tokenizer, max_length=4096, batch_size=1, progress=False)


@pytest.mark.parametrize("ahead", [1, 2, 3, 4096])
@pytest.mark.parametrize("begins", [False, True], ids=["plain", "bos"])
@pytest.mark.parametrize("name", ["bpe1024", "t5", "gpt2"])
def test_texts_that_are_tokenized_together_are_what_the_harness_makes_of_each(
    name, begins, ahead, model, told, monkeypatch
):
    tokenizer = transformers_tokenizer(name, 128)
    if begins:
        token = (tokenizer.eos_token, tokenizer.eos_token_id)
        special = TemplateProcessing(single=f"{token[0]} $A", special_tokens=[token])
        tokenizer.backend_tokenizer.post_processor = special
    monkeypatch.setattr(harness, "AHEAD", ahead)
    lm = ours(model, tokenizer)
    for each in (lm, HFLM(pretrained=model, backend="causal", tokenizer=tokenizer, max_length=4096, batch_size=1), lm):
        each.loglikelihood(asking(PAIRS * 2), disable_tqdm=True)
    assert told[0] == told[1] == told[2] and len(told[0]) == 2 * len(PAIRS)


def test_only_a_text_that_begins_with_the_special_token_is_tokenized_alone(model, told, monkeypatch):
    monkeypatch.setattr(harness, "AHEAD", 4)
    alone = []
    encode = HFLM.tok_encode
    monkeypatch.setattr(HFLM, "tok_encode", lambda lm, text, **more: alone.append(text) or encode(lm, text, **more))
    lm = ours(model, transformers_tokenizer("bpe1024", 128))
    pairs = [(f"question {n}", f" answer {n}") for n in range(20)]
    lm.loglikelihood(asking([*pairs[:5], ("</s>question", " answer"), *pairs[5:]]), disable_tqdm=True)
    assert alone == ["</s>question answer", "</s>question"]


def beginning(name):
    """The tokenizer, and one that itself puts its EOS, which stands for BOS, in front."""
    plain, adds = transformers_tokenizer(name, 128), transformers_tokenizer(name, 128)
    token = (adds.eos_token, adds.eos_token_id)
    adds.backend_tokenizer.post_processor = TemplateProcessing(single=f"{token[0]} $A", special_tokens=[token])
    return plain, adds


@pytest.mark.parametrize("name", ["bpe1024", "gpt2"])
def test_requests_that_begin_with_bos_are_the_harness_own_with_a_tokenizer_that_adds_it(name, model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        HFLM, "_loglikelihood_tokens", lambda lm, given, **_: asked.append(given) or [(0.0, False)] * len(given)
    )
    plain, adds = beginning(name)
    of = {"model": model, "max_length": 4096, "batch_size": 1, "progress": False}
    harness.CountingLM(tokenizer=plain, bos=True, **of).loglikelihood(asking(PAIRS), disable_tqdm=True)
    harness.CountingLM(tokenizer=adds, bos=True, **of).loglikelihood(asking(PAIRS), disable_tqdm=True)
    own = {"pretrained": model, "backend": "causal", "max_length": 4096, "batch_size": 1, "add_bos_token": True}
    its_own = HFLM(tokenizer=adds, **own)
    its_own.loglikelihood(asking(PAIRS), disable_tqdm=True)
    tokens = [[context + option for _, context, option in given] for given in asked]
    assert tokens[0] == tokens[1] == tokens[2] and all(row[0] == plain.eos_token_id for row in tokens[0])
    assert [given[2] for given in asked[0]] == [given[2] for given in asked[2]], "the same options are scored"


@pytest.mark.parametrize("name", ["bpe1024", "t5"])
def test_context_and_option_can_be_tokenized_apart_without_the_blanks_around_them(name, model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        HFLM, "_loglikelihood_tokens", lambda lm, given, **_: asked.append(given) or [(0.0, False)] * len(given)
    )
    tokenizer = transformers_tokenizer(name, 128)
    lm = harness.CountingLM(model, tokenizer, max_length=99, batch_size=1, progress=False, bos=True, apart=True)
    lm.loglikelihood(asking([("Question: why?\nAnswer: ", " because \n"), ("a", "b")]), disable_tqdm=True)
    plain = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    assert [(context, option) for _, context, option in asked[0]] == [
        ([tokenizer.eos_token_id, *tokenizer.encode("Question: why?\nAnswer:")], plain("because")),
        ([tokenizer.eos_token_id, *tokenizer.encode("a")], plain("b")),
    ]
    _, adds = beginning("bpe1024")
    lm = harness.CountingLM(model, adds, max_length=99, batch_size=1, progress=False, bos=True, apart=True)
    lm.loglikelihood(asking([("a", " b")]), disable_tqdm=True)
    ((_, context, option),) = asked[1]
    assert context == adds.encode("a") and option == adds.encode("b", add_special_tokens=False), "no BOS in the middle"


def test_a_request_that_is_cut_keeps_its_bos_and_counts_as_cut(model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        HFLM, "_loglikelihood_tokens", lambda lm, given, **_: asked.append(given) or [(0.0, False)] * len(given)
    )
    plain, _ = beginning("bpe1024")
    pair = ("one two three four five six seven eight nine ten", " eleven")
    whole = plain.encode(pair[0] + pair[1])
    for length in (8, len(whole) - 1, len(whole)):
        lm = harness.CountingLM(model, plain, max_length=length, batch_size=1, progress=False, bos=True)
        lm.loglikelihood(asking([pair]), disable_tqdm=True)
        ((_, context, option),) = asked.pop()
        assert context + option == [plain.eos_token_id, *whole[-length:]]
        assert lm.cut["piqa"] == (length < len(whole))


def test_no_tokens_are_kept_while_the_model_runs(model, monkeypatch):
    held = []
    monkeypatch.setattr(
        HFLM, "_loglikelihood_tokens", lambda lm, asked, **_: held.append(lm._encoded) or [(0.0, False)]
    )
    ours(model, transformers_tokenizer("bpe1024", 128)).loglikelihood(asking([("one", " word")]), disable_tqdm=True)
    assert held == [{}]


def test_templates_are_compiled_once_while_the_harness_runs_and_its_own_way_is_back_after_a_fault(
    tmp_path, monkeypatch
):
    items, compiled = prepared(tmp_path, tasks=("piqa",)), []
    compile_whole, its_own = Environment.compile, env.from_string

    def compile_told(self, source, *args, **more):
        compiled.append(source)
        return compile_whole(self, source, *args, **more)

    monkeypatch.setattr(Environment, "compile", compile_told)
    harness.evaluate_lm(Scorer(lambda request: -1.0), ["piqa"], items, few_shot=5, limit=20)
    assert 0 < len(compiled) == len(set(compiled)), "each template once"
    with pytest.raises(KeyError, match="no such value"):
        harness.evaluate_lm(Scorer(lambda request: {}["no such value"]), ["piqa"], items, few_shot=0, limit=2)
    assert env.from_string == its_own
