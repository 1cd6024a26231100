"""Measurements inside models of several families, against models computed by hand, closed forms and autograd."""

import math

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import ortho_group
from support_model import MIX, model_of
from support_models import fresh
from torch import nn

from paperlm.errors import JobError
from paperlm.probe.angular import angular_distances, scaled
from paperlm.probe.blocks import anatomy, forward_streams, recorded_streams
from paperlm.probe.gradients import gradient_norms
from paperlm.probe.losses import next_token_losses, sequence_losses
from paperlm.probe.removal import removed
from paperlm.probe.variance import output_variances

LENGTHS = (9, 5, 2, 1)
SMALL = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_hidden_layers": 3}
GPT2 = {"vocab_size": 37, "n_embd": 24, "n_head": 3, "n_layer": 3, "n_positions": 16, "attn_pdrop": 0.5}
NEW = {
    "paperlm": lambda: model_of(MIX).float(),
    "llama": lambda: fresh(transformers.LlamaForCausalLM, **SMALL),
    "qwen2": lambda: fresh(transformers.Qwen2ForCausalLM, **SMALL, num_key_value_heads=1),
    "gpt2": lambda: fresh(transformers.GPT2LMHeadModel, **GPT2),
    "gpt_neox": lambda: fresh(transformers.GPTNeoXForCausalLM, **SMALL),
}
BERT = {
    "bert": lambda: fresh(transformers.BertModel, **SMALL),
    "bert_qa": lambda: fresh(transformers.BertForQuestionAnswering, **SMALL),
}
decoders = pytest.mark.parametrize("family", NEW)
families = pytest.mark.parametrize("family", [*NEW, *BERT])


def model(family):
    torch.manual_seed(0)
    return (NEW | BERT)[family]().eval()


def text(lengths=LENGTHS, seed=1):
    ids = torch.randint(2, 37, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


class Toy(nn.Module):
    """Embedding and blocks of any kind, called as a transformers model without a head is."""

    def __init__(self, blocks, vocab=37, width=8):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(vocab, width), nn.ModuleList(blocks)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask, use_cache):
        x = self.embedding(input_ids)
        for block in self.layers:
            x = block(x)
        return x


class Map(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@families
def test_streams_are_the_embeddings_output_and_each_blocks_and_the_final_norm_makes_the_last_state_of_them(family):
    net, (ids, mask) = model(family), text()
    parts = anatomy(net)
    with torch.no_grad():
        streams = forward_streams(net, ids, mask)
        states = net.base_model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    assert len(parts.blocks) == 3 and len(streams) == 4
    for stream, state in zip(streams[:-1], states.hidden_states, strict=False):
        torch.testing.assert_close(stream, state, rtol=0, atol=0)
    if family in BERT:
        assert parts.final_norm is None
        last = streams[-1]
    else:
        last = parts.final_norm(streams[-1]).detach()
        assert not torch.allclose(last, streams[-1])
    torch.testing.assert_close(last, states.last_hidden_state, rtol=0, atol=0)
    assert parts.embedding.weight.shape == (37, 24)


@families
def test_hooks_are_gone_after_use_also_after_an_error(family):
    net = model(family)
    with pytest.raises(ZeroDivisionError), recorded_streams(anatomy(net).blocks), removed(net, 2):
        raise ZeroDivisionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in anatomy(net).blocks)


def test_a_model_without_a_known_list_of_blocks_is_refused_with_the_names_that_were_looked_for():
    with pytest.raises(JobError, match=r"Linear: no list of blocks.* in Linear for layers, h, .*encoder\.layer.*add"):
        anatomy(nn.Linear(2, 2))
    with pytest.raises(JobError, match="T5ForConditionalGeneration: no list of blocks"):
        shape = {"vocab_size": 37, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1}
        anatomy(fresh(transformers.T5ForConditionalGeneration, **shape))


def angles_by_hand(streams, mask, last_only):
    """The definition, one token at a time, in Python floats."""
    depth = len(streams) - 1
    found = np.full((depth, depth), np.nan)
    for low in range(depth):
        for high in range(low + 1, depth + 1):
            values = []
            for row in range(len(mask)):
                places = range(1, int(mask[row].sum()))
                for t in list(places)[-1:] if last_only else places:
                    u, v = (streams[i][row, t].double().numpy() for i in (low, high))
                    values.append(math.acos(max(-1.0, min(1.0, u @ v / math.sqrt((u @ u) * (v @ v))))) / math.pi)
            found[low, high - low - 1] = np.mean(values)
    return found


@families
def test_angular_distances_are_those_of_the_definition(family):
    net, (ids, mask) = model(family), text()
    with torch.no_grad():
        streams = forward_streams(net, ids, mask)
    found = angular_distances(net, [(ids[:3], mask[:3]), (ids[3:], mask[3:])])
    assert (found.tokens, found.sequences) == (8 + 4 + 1, 3)
    np.testing.assert_allclose(found.raw, angles_by_hand(streams, mask, False), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.raw_last, angles_by_hand(streams, mask, True), rtol=1e-6, atol=1e-7)


def test_rotations_have_the_angles_they_turn_by_an_identity_has_none_and_a_scale_changes_nothing():
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    half = torch.tensor([[1.0, -1.0], [1.0, 1.0]]) / math.sqrt(2)
    steps = [
        Map(lambda x: x),
        Map(lambda x: x @ quarter),
        Map(lambda x: 7 * x),
        Map(lambda x: x @ half),
        Map(torch.neg),
    ]
    found = angular_distances(Toy(steps, width=2), [text()])
    expected = np.full((5, 5), np.nan)
    angles = np.array([0.0, 0.5, 0.0, 0.25, 1.0])
    for low in range(5):
        turned = np.cumsum(angles[low:])  # all turns go the same way
        expected[low, : 5 - low] = np.abs((turned + 1) % 2 - 1)
    np.testing.assert_allclose(found.raw, expected, atol=1e-7)
    np.testing.assert_allclose(found.raw_last, expected, atol=1e-7)


def test_a_token_without_a_direction_is_left_out_where_it_has_none():
    toy = Toy([Map(lambda x: x + 1.0), Map(lambda x: x)])
    with torch.no_grad():
        toy.embedding.weight[5] = 0.0
    ids, mask = torch.tensor([[3, 5, 4, 5]]), torch.ones(1, 4, dtype=torch.long)
    found = angular_distances(toy, [(ids, mask)])
    x = toy.embedding.weight[4].double().detach()
    expected = math.acos(float(x @ (x + 1) / (x.norm() * (x + 1).norm()))) / math.pi
    assert found.raw[0, 0] == pytest.approx(expected, abs=1e-6)
    assert math.isnan(found.raw_last[0, 0]) and found.raw_last[1, 0] == pytest.approx(0.0, abs=1e-7)


def test_the_display_scale_clips_each_n_to_its_percentiles_and_stretches_it_from_0_to_1():
    raw = np.full((5, 5), np.nan)
    raw[:, 0] = [0.1, 0.2, 0.3, 0.4, 0.9]
    raw[:4, 1] = 0.25
    raw[0, 4] = 0.7
    found = scaled(raw)
    low, high = 0.1 + 0.04 * 0.1, 0.4 + 0.96 * 0.5  # 1 % and 99 % of the way from the first to the last of five values
    np.testing.assert_allclose(
        found[:, 0], [0, (0.2 - low) / (high - low), (0.3 - low) / (high - low), (0.4 - low) / (high - low), 1]
    )
    assert (found[:4, 1] == 0).all() and found[0, 4] == 0
    assert (np.isnan(found) == np.isnan(raw)).all()


def test_variances_are_those_of_numpy_over_real_tokens():
    net, (ids, mask) = model("llama"), text()
    with torch.no_grad():
        streams = forward_streams(net, ids, mask)
    found = output_variances(net, [(ids[:1], mask[:1]), (ids[1:], mask[1:])])
    for block, stream in enumerate(streams[1:]):
        rows = stream.double()[mask.bool()].numpy()
        assert found.per_token[block] == pytest.approx(rows.var(axis=1).mean(), rel=1e-9)
        assert found.overall[block] == pytest.approx(rows.var(), rel=1e-9)
    assert found.tokens == sum(LENGTHS) == len(rows)


def test_the_variance_of_a_stream_with_a_large_mean_has_its_closed_form():
    # features are m, m+1, ..., m+7: 63/12 within a token, and 4 more between tokens of m = 1000 and 1004
    toy = Toy([Map(lambda x: x), Map(lambda x: 3 * x)])
    with torch.no_grad():
        toy.embedding.weight[:] = torch.arange(8.0) + 1000
        toy.embedding.weight[1] += 4
    found = output_variances(toy, [(torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2, dtype=torch.long))])
    np.testing.assert_allclose(found.per_token, [63 / 12, 9 * 63 / 12], rtol=1e-9)
    np.testing.assert_allclose(found.overall, [63 / 12 + 4, 9 * (63 / 12 + 4)], rtol=1e-9)


def mean_loss(net, ids, mask):
    """Mean over all next tokens, with transformers' labels."""
    logits = net(input_ids=ids, attention_mask=mask).logits
    picked = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return -(picked * mask[:, 1:]).sum() / mask[:, 1:].sum()


@decoders
def test_gradient_norms_are_autograds_of_the_whole_batch_however_it_is_cut(family):
    net, (ids, mask) = model(family).double(), text()
    found = gradient_norms(net, [[(ids[:1], mask[:1]), (ids[1:], mask[1:])], [(ids, mask)]])
    assert all(p.grad is None for p in net.parameters())

    # The definition on other ways: one pass of the whole batch, gradients of chosen tensors by torch.autograd.grad.
    blocks = anatomy(net).blocks
    for index, block in enumerate(blocks):
        names = [name for name, p in block.named_parameters() if p.ndim == 2]
        assert len(names) in (4, 6, 7) and not any("norm" in name or "ln_" in name for name in names)
        assert [name.removesuffix(".weight") for name in names] == list(found.tensors[index])
        with recorded_streams(blocks) as streams:
            loss = mean_loss(net, ids, mask)
        wanted = [block.get_parameter(name) for name in names]
        *grads, stream = torch.autograd.grad(loss, [*wanted, streams[index]])
        whole = torch.cat([g.flatten() for g in grads]).norm()
        assert found.blocks[index] == pytest.approx(float(whole), rel=1e-5)
        assert found.inputs[index] == pytest.approx(float(stream.norm()), rel=1e-5)
        for name, grad in zip(found.tensors[index], grads, strict=True):
            assert found.tensors[index][name] == pytest.approx(float(grad.norm()), rel=1e-5)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_matrix_that_the_loss_does_not_use_has_a_gradient_of_zero_and_a_frozen_one_that_of_the_others():
    net, (ids, mask) = model("llama").double(), text()
    plain = gradient_norms(net, [[(ids, mask)]])
    net.requires_grad_(False)
    anatomy(net).blocks[1].unused = nn.Parameter(torch.ones(3, 3, dtype=torch.float64), requires_grad=False)
    found = gradient_norms(net, [[(ids, mask)]])
    assert found.tensors[1].pop("unused") == 0.0
    assert found.tensors == [pytest.approx(norms, rel=1e-12) for norms in plain.tensors]
    assert found.blocks == pytest.approx(plain.blocks, rel=1e-12) and min(plain.blocks) > 0


def test_gradient_norms_of_two_linear_blocks_are_those_of_the_chain_rule_by_hand():
    rng = np.random.default_rng(0)
    weights = [ortho_group.rvs(4, random_state=seed) * 1.5 for seed in (1, 2)]
    table, head = rng.normal(size=(6, 4)), rng.normal(size=(6, 4))

    class Net(Toy):
        base_model = property(lambda self: self)

        def can_generate(self):
            return True

        def forward(self, input_ids, attention_mask, use_cache):
            states = super().forward(input_ids, attention_mask, use_cache)
            return transformers.modeling_outputs.CausalLMOutput(logits=states @ torch.tensor(head).T)

    net = Net([nn.Linear(4, 4, dtype=torch.float64) for _ in weights], vocab=6, width=4).double()
    with torch.no_grad():
        net.embedding.weight[:] = torch.tensor(table)
        for layer, weight in zip(net.layers, weights, strict=True):
            layer.weight[:], layer.bias[:] = torch.tensor(weight), 0.0
    ids = torch.tensor([[1, 4, 2]])
    found = gradient_norms(net, [[(ids, torch.ones_like(ids))]])

    x1 = table[[1, 4]]  # the last token predicts nothing
    x2 = x1 @ weights[0].T
    x3 = x2 @ weights[1].T
    p = np.exp(x3 @ head.T)
    p /= p.sum(1, keepdims=True)
    d3 = (p - np.eye(6)[[4, 2]]) @ head / 2
    d2 = d3 @ weights[1]
    d1 = d2 @ weights[0]
    np.testing.assert_allclose(found.inputs, [np.linalg.norm(d1), np.linalg.norm(d2)], rtol=1e-6)
    np.testing.assert_allclose(found.blocks, [np.linalg.norm(d2.T @ x1), np.linalg.norm(d3.T @ x2)], rtol=1e-6)
    assert found.loss == pytest.approx(-np.log(p[[0, 1], [4, 2]]).mean(), rel=1e-6)


@decoders
def test_a_removed_block_is_one_that_was_never_there_and_comes_back(family):
    net, (ids, mask) = model(family), text()
    whole = sequence_losses(net, [(ids, mask)]).sums
    with removed(net, 2):
        found = sequence_losses(net, [(ids, mask)]).sums
    assert np.abs(found - whole)[:3].min() > 1e-4
    np.testing.assert_array_equal(sequence_losses(net, [(ids, mask)]).sums, whole)
    blocks = next(m for m in net.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    del blocks[1]
    np.testing.assert_allclose(found, sequence_losses(net, [(ids, mask)]).sums, rtol=1e-5)


@decoders
def test_generation_with_a_cache_is_that_without_one_when_a_block_is_removed(family):
    net, (ids, _) = model(family), text((5, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for block in (1, 3):
        with removed(net, block):
            cached, whole = (net.generate(ids, use_cache=cache, **options) for cache in (True, False))
        assert torch.equal(cached, whole)


def test_removing_a_block_that_adds_nothing_changes_nothing():
    net, (ids, mask) = model("llama"), text()
    with torch.no_grad():
        net.model.layers[1].self_attn.o_proj.weight.zero_()
        net.model.layers[1].mlp.down_proj.weight.zero_()
    whole = sequence_losses(net, [(ids, mask)])
    with removed(net, 2):
        np.testing.assert_array_equal(sequence_losses(net, [(ids, mask)]).sums, whole.sums)
    np.testing.assert_allclose(angular_distances(net, [(ids, mask)]).raw[1, 0], 0.0, atol=1e-7)


@pytest.mark.parametrize("block", [0, 4, -1])
def test_a_block_that_does_not_exist_is_refused(block):
    with (
        pytest.raises(JobError, match=rf"no block {block} to remove; its blocks are 1 to 3"),
        removed(model("gpt2"), block),
    ):
        pass


@decoders
def test_next_token_losses_are_transformers_own_and_count_no_padding(family):
    net, (ids, mask) = model(family), text()
    found = sequence_losses(net, [(ids, mask)])
    for row, length in enumerate(LENGTHS):
        alone = ids[row : row + 1, :length]
        expected = net(input_ids=alone, labels=alone).loss.item() * (length - 1) if length > 1 else 0.0
        assert found.sums[row] == pytest.approx(expected, rel=1e-5)
    assert found.counts.tolist() == [length - 1 for length in LENGTHS]
    assert next_token_losses(net, ids, mask).shape == (4, 8)


@pytest.mark.parametrize("family", BERT)
def test_a_bert_is_no_decoder_and_is_told_so(family):
    net, batch = model(family), text()
    for measure in (lambda: sequence_losses(net, [batch]), lambda: gradient_norms(net, [[batch]])):
        with pytest.raises(JobError, match=r"predicts no next token.*angular distance and output variance"):
            measure()
    assert np.isfinite(output_variances(net, [batch]).per_token).all()
