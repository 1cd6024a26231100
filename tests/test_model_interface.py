"""The decoder under transformers' contract: masks, caches, outputs, checkpointing, offloading, adapters, its keys."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from support import job_environment
from support_model import (
    HEADS,
    LAYERS,
    LEAK,
    METHODS,
    MIX,
    PAD,
    SHARED,
    VOCAB,
    WIDTH,
    close,
    config_of,
    each,
    model_of,
    padded,
    randomize,
    tokens,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM

from paperlm.errors import SpecError
from paperlm.models.llama import (
    PaperLlamaForSequenceClassification,
    PaperLlamaModel,
)

EAGER = {"attn_implementation": "eager"}
BOUNDS = {"sdpa": 1e-9, "eager": 16 * torch.finfo(torch.float32).eps}
"""Of logits of order 1 in float64. The softmax of eager attention is float32, whatever the model, and how many masked
entries stand in a row changes the order of its sum, on some processors."""
LENGTHS = (4, 6, 1)
STARTS_ANEW = torch.tensor([[*range(4), *range(6), 0]])


def alone(model, ids):
    """Logits of three documents, each read alone, side by side."""
    return torch.cat([model(document, use_cache=False).logits for document in ids.split(LENGTHS, 1)], 1)


# --- masks and positions ---


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, EAGER], ids=["sdpa", "eager"])
@each([*METHODS, *SHARED])
def test_documents_packed_into_a_row_do_not_see_each_other(norm, options, training):
    model, ids = model_of(norm, **options).train(training), tokens(1)
    expected = alone(model, ids)
    assert (model(ids).logits - expected).abs().max() > 0.1
    close(model(ids, position_ids=STARTS_ANEW).logits, expected, BOUNDS[options.get("attn_implementation", "sdpa")])


def test_rows_packed_at_different_places_are_told_apart():
    model, ids = model_of(MIX), tokens(2)
    positions = torch.tensor([[*range(4), *range(7)], [*range(9), *range(2)]])
    found = model(ids, position_ids=positions).logits
    for row, cut in enumerate((4, 9)):
        expected = [model(part[None]).logits[0] for part in ids[row].split((cut, 11 - cut))]
        close(found[row], torch.cat(expected))


@pytest.mark.parametrize("options", [{}, EAGER], ids=["sdpa", "eager"])
def test_a_mask_of_four_axes_is_taken_as_it_is(options):
    model, ids = model_of(MIX, **options), tokens(1)
    document = torch.tensor([0] * 4 + [1] * 6 + [2])
    allowed = (document[:, None] == document[None]).tril()[None, None]
    mask = torch.zeros(1, 1, 11, 11, dtype=torch.float64).masked_fill(~allowed, -1e30) if options else allowed
    found = model(ids, attention_mask=mask, position_ids=STARTS_ANEW).logits
    close(found, alone(model, ids), BOUNDS[options.get("attn_implementation", "sdpa")])


def test_eager_attention_computes_the_same_and_shows_its_weights():
    model, eager = model_of(MIX).float(), model_of(MIX, **EAGER).float()  # its softmax is float32, whatever the model
    ids, mask, places = padded("left")
    out = eager(ids, attention_mask=mask, output_attentions=True)
    for row, place in enumerate(places):
        close(out.logits[row, place], model(ids, attention_mask=mask).logits[row, place], 1e-4)
    assert [w.shape for w in out.attentions] == [(3, HEADS, 11, 11)] * LAYERS
    close(out.attentions[1][1, :, 4:].sum(-1), torch.ones(HEADS, 7), 1e-6)
    assert not out.attentions[1][1, :, 4:, :4].any() and not out.attentions[0].triu(1)[0].any()


def test_generation_with_a_static_cache_writes_the_same():
    model = model_of(MIX)
    model.generation_config.eos_token_id = None
    ids, mask, _ = padded("left")
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


def test_the_forward_pass_is_one_graph():
    model, ids = model_of(MIX, n_layers=2), tokens(1)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(ids, position_ids=STARTS_ANEW).logits, alone(model, ids))
    ids, mask, places = padded("left")
    close(compiled(ids, attention_mask=mask).logits[1, places[1]], model(ids[1:2, places[1]]).logits[0])


@pytest.mark.slow
def test_the_compiled_training_step_has_the_gradients_of_the_eager_one():
    model, ids = model_of(MIX).float().train(), tokens()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    gradients = []
    for module in (model, compiled):
        module(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    close(gradients[1], gradients[0], 1e-4)


def test_more_tokens_than_positions_are_refused():
    model = model_of(MIX, max_position_embeddings=11)
    assert model(tokens()).logits.shape[1] == 11
    ids = tokens(1, 12)
    padding_left = torch.tensor([[0] + [1] * 11])
    assert model(ids, attention_mask=padding_left).logits.isfinite().all(), "padding takes no position"
    for call in (
        lambda: model(ids),
        lambda: model.model.hidden(ids),
        lambda: model(ids[:, :3], position_ids=torch.tensor([[9, 10, 11]])),
        lambda: model(ids[:, 11:], past_key_values=model(ids[:, :11]).past_key_values),
    ):
        with pytest.raises(SpecError, match="12 tokens, and the model has 11 positions"):
            call()


# --- statistics over the sequence ---


@each([LEAK, {"name": "scaled_embed", "base": LEAK}])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_stays_out_of_statistics_over_the_sequence(norm, side):
    model, (ids, mask, places) = model_of(norm), padded(side)
    logits = model(ids, attention_mask=mask).logits
    other = model(torch.where(mask == 0, 7, ids), attention_mask=mask).logits
    for row, place in enumerate(places):
        close(logits[row, place], model(ids[row, place][None]).logits[0], 1e-5)
        assert torch.equal(logits[row, place], other[row, place])
    if side == "right":  # the training path is what the authors ran: padding counts
        assert (model.lm_head(model.model.hidden(ids))[1, :7] - logits[1, :7]).abs().max() > 1e-3


def test_what_statistics_over_the_sequence_cannot_do_is_refused():
    model, ids = model_of(LEAK), tokens(1)
    for options, message in (
        ({"position_ids": STARTS_ANEW}, "without packing"),
        ({"attention_mask": torch.ones(1, 1, 11, 11, dtype=torch.bool)}, r"a mask \(B, S\)"),
        ({"past_key_values": model_of(MIX)(ids).past_key_values}, "use_cache=False"),
    ):
        for part in (model, model.model):
            with pytest.raises(SpecError, match=message):
                part(ids, **options)
    assert model.model(ids, use_cache=True).past_key_values is None


# --- outputs ---


def test_the_plain_tuple_has_the_parts_of_the_output_in_order():
    model, ids = model_of(MIX), tokens()
    score = randomize(PaperLlamaForSequenceClassification(config_of(MIX)))
    options = {"use_cache": False, "return_dict": False}
    logits, states = model(ids, output_hidden_states=True, **options)
    assert torch.equal(logits, model(ids).logits) and len(states) == LAYERS + 1
    loss, logits = model(ids, labels=ids, **options)
    assert loss.ndim == 0 and logits.ndim == 3
    (last,) = model.model(ids, **options)
    assert torch.equal(last, model.model.hidden(ids))
    loss, scores = score(ids, labels=torch.ones(3, dtype=torch.float64), **options)
    assert loss.ndim == 0 and scores.shape == (3, 1)
    (of_config,) = model_of(MIX, return_dict=False)(ids, use_cache=False)
    assert torch.equal(of_config, model(ids).logits)


def test_streams_are_the_hidden_states_before_the_final_norm():
    model, ids = model_of({"name": "pre_ln"}), tokens()
    states = model(ids, output_hidden_states=True).hidden_states
    streams = list(model.model.streams(ids))
    assert len(streams) == len(states) == LAYERS + 1
    assert all(torch.equal(a, b) for a, b in zip(streams[:-1], states[:-1], strict=True))
    assert torch.equal(model.model.norm(streams[-1]), states[-1]) and not torch.allclose(streams[-1], states[-1])


def test_embeddings_stand_for_their_ids_in_every_head():
    norm = {"name": "scaled_embed", "base": MIX, "preset": "multiplier"}
    model, score = model_of(norm), randomize(PaperLlamaForSequenceClassification(config_of(norm)))
    (ids, mask, _), factor = padded("left"), WIDTH**0.5
    for head in (model, score):
        embeds = head.get_input_embeddings()(ids) * factor
        for options in ({"attention_mask": mask}, {}):
            expected = head(torch.where(ids == PAD, 5, ids) if not options else ids, **options).logits
            if not options:
                embeds = head.get_input_embeddings()(torch.where(ids == PAD, 5, ids)) * factor
            close(head(inputs_embeds=embeds, **options).logits, expected)
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            head(ids, inputs_embeds=embeds)
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            head()


def test_labels_that_are_shifted_already_give_the_same_loss():
    model, ids = model_of(MIX), tokens()
    shifted = torch.cat((ids[:, 1:], torch.full((3, 1), -100)), 1)
    expected = model(ids, labels=ids).loss
    for options in ({"shift_labels": shifted}, {"labels": ids, "shift_labels": shifted}):
        assert torch.equal(model(ids, **options).loss, expected)
    close(model(ids, shift_labels=shifted, num_items_in_batch=torch.tensor(15)).loss, expected * 30 / 15, 1e-6)


def test_logits_can_be_had_for_some_positions_only():
    model, ids = model_of(MIX), tokens()
    everything = model(ids).logits
    rows = torch.tensor([[0, 3], [5, 1], [10, 10]])
    chosen = torch.zeros(3, 11, dtype=torch.bool)
    chosen[0, 2] = chosen[2, 4] = chosen[2, 9] = True
    for keep, expected in (
        (1, everything[:, -1:]),
        (0, everything),
        (torch.tensor([2, 7]), everything[:, [2, 7]]),
        (rows, everything[torch.arange(3)[:, None], rows]),
        (chosen, everything[chosen]),
    ):
        close(model(ids, logits_to_keep=keep).logits, expected)


def test_gradient_accumulation_of_a_classifier_is_left_to_the_trainer():
    assert PaperLlamaForSequenceClassification.accepts_loss_kwargs is False
    score = randomize(PaperLlamaForSequenceClassification(config_of(MIX)))
    labels = torch.tensor([0.5, 1.0, -1.0], dtype=torch.float64)
    scores = score(tokens()).logits[:, 0]
    close(score(tokens(), labels=labels, num_items_in_batch=9).loss, (scores - labels).square().mean())


# --- checkpointing, offloading, adapters, resizing ---


@pytest.mark.parametrize("reentrant", [False, True])
@each([*METHODS, *SHARED, LEAK])
def test_gradient_checkpointing_computes_blocks_twice_and_changes_no_gradient(norm, reentrant):
    model, ids = model_of(norm).train(), tokens()
    calls = []
    model.model.layers[1].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    paths = (lambda: model(ids, labels=ids).loss, lambda: model.summed_loss(ids, ids))
    expected = [torch.autograd.grad(loss(), list(model.parameters())) for loss in paths]
    assert len(calls) == 2
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=reentrant))  # its public name changes
    for loss, right in zip(paths, expected, strict=True):
        calls.clear()
        model.zero_grad()
        loss().backward()  # reentrant checkpointing knows no autograd.grad
        assert len(calls) == 2
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), right, strict=True))
    assert model(ids, use_cache=True).past_key_values is None


@each([*METHODS, *SHARED, LEAK])
def test_a_model_whose_blocks_stay_on_disk_computes_the_same(norm, tmp_path):
    pytest.importorskip("accelerate")
    model = model_of(norm)
    model.save_pretrained(tmp_path)
    ends = [f"model.{end}" for end in ("entry", "exit") if getattr(model.model, end) is not None]
    places = {"model.embed_tokens": "cpu"} | dict.fromkeys(["model.layers", *ends, "model.norm", "lm_head"], "disk")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    assert all(p.is_meta for p in loaded.model.layers.parameters())
    ids, mask, places = padded("left")
    found, expected = loaded(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits
    for row, place in enumerate(places):
        close(found[row, place], expected[row, place])


def test_peft_knows_which_modules_of_the_decoder_lora_adapts(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model_of(MIX), peft.LoraConfig())
    names = {n.split(".")[-4] for n, p in adapted.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}, "as for LLaMA"
    close(adapted(tokens()).logits, model_of(MIX)(tokens()).logits)


def test_models_are_made_without_importing_peft():
    code = (
        "import sys; from paperlm.models.llama import *; m = PaperLlamaForCausalLM(PaperLlamaConfig(hidden_size=8, "
        "intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)); m.config.to_dict(); "
        "assert 'peft' not in sys.modules; import peft; p = peft.get_peft_model(m, peft.LoraConfig()); "
        "p = peft.get_peft_model(m, peft.IA3Config())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=job_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_adapter_on_the_feed_forward_is_not_bypassed_where_a_gpu_aligns_widths():
    peft = pytest.importorskip("peft")
    model = model_of(MIX)  # a width of 21: a GPU pads it
    assert model.model.layers[0].mlp.padding and model.model.layers[0].mlp._plain()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"]))
    assert not model.model.layers[0].mlp._plain()


def test_the_vocabulary_can_grow_unless_its_last_row_has_a_meaning(tmp_path):
    model, ids = model_of(MIX), tokens()
    before = model(ids).logits
    model.resize_token_embeddings(VOCAB + 5)
    after = model(ids, labels=ids)
    close(after.logits[..., :VOCAB], before)
    assert after.logits.shape[-1] == VOCAB + 5 and after.loss.isfinite()
    model.save_pretrained(tmp_path)
    close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, after.logits)
    held = model_of(MIX, zero_last_embedding_row=True)
    assert held.resize_token_embeddings(VOCAB) is held.model.embed_tokens
    with pytest.raises(SpecError, match="the last row is held at zero"):
        held.resize_token_embeddings(VOCAB + 5)


def test_a_folder_loads_as_a_trunk_without_its_head(tmp_path):
    model = model_of(MIX)
    model.save_pretrained(tmp_path)
    trunk, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(trunk) is PaperLlamaModel and not report["missing_keys"]
    close(trunk(tokens()).last_hidden_state, model.model.hidden(tokens()))
