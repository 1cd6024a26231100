"""Stored weights in models that are not made of nn.Linear alone: what is stored, and what is said of the rest."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import transformers
from paperlm_kernels.stored import LomoSgd, RawStore, StoredLinear, chosen_weights, convert, weight_hashes
from support import job_environment
from support_models import fresh
from support_stored import IDS, CodedStore, ZippedStore, batch, build
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from paperlm.models.config import PaperLlamaConfig
from paperlm.models.llama import PaperLlamaForCausalLM
from paperlm.models.sizes import SIZES

MODELS = {
    "falcon": (transformers.FalconForCausalLM, IDS | {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": True, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "tie_word_embeddings": True,
    }),
    "mixtral": (transformers.MixtralForCausalLM, IDS | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 32,
    }),
    "bert": (transformers.BertForMaskedLM, IDS | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "mamba": (transformers.MambaForCausalLM, IDS | {
        "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4,
    }),
}  # fmt: skip
"Name -> class and settings."
LEAVE = {"mamba": ["dt_proj.weight"]}


def architecture(name):
    """In bfloat16 and training mode."""
    cls, settings = MODELS[name]
    return fresh(cls, **settings).bfloat16().train()


def hashes_of_two_steps(name, store):
    model = architecture(name)
    done = convert(model, store, leave=LEAVE.get(name, ()))
    optimizer, hashes = LomoSgd(model, 0.3), [weight_hashes(model)]
    for step in range(2):
        model(**batch(step)).loss.backward()
        optimizer.step()
        hashes.append(weight_hashes(model))
    return hashes, set(done.names)


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_give_the_same_bits_as_with_raw_weights_after_each(name):
    (raw, stored), (packed, _) = (hashes_of_two_steps(name, store) for store in (RawStore, CodedStore))
    assert packed == raw
    assert all(raw[0][key] != raw[2][key] for key in stored)


def test_every_linear_layer_of_falcon_is_stored_and_computes_what_it_computed_up_to_rounding():
    plain = architecture("falcon").float().eval()
    model = copy.deepcopy(plain)
    names = convert(model, RawStore).names
    assert {n.split(".")[-2] for n in names} == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert not any(isinstance(m, FalconLinear) for m in model.modules())
    ids = {"input_ids": batch(0)["input_ids"]}
    torch.testing.assert_close(model(**ids).logits, plain(**ids).logits, rtol=1e-5, atol=1e-6)


def test_a_head_of_another_name_that_is_an_embedding_stays_plain_and_is_said_to():
    """BERT's is called decoder, Whisper's proj_out."""
    model = architecture("bert")
    done = convert(model, RawStore)
    assert done.left == {"cls.predictions.decoder": "its weight is an embedding's"}
    assert "linear layers left: cls.predictions.decoder (its weight is an embedding's)" in str(done)
    decoder = model.get_submodule("cls.predictions.decoder")
    assert type(decoder) is nn.Linear and decoder.weight is model.get_input_embeddings().weight
    assert len(done.names) == 2 * 6 + 1 and set(chosen_weights(architecture("bert"))) == set(done.names)
    with pytest.raises(ValueError, match=r"tied to cls\.predictions\.decoder|is tied to bert\.embeddings"):
        convert(architecture("bert"), RawStore, "all_linear")


def test_a_linear_layer_without_a_weight_of_its_own_is_left_and_named():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Embedding(3, 4)})
    del model["b"]._parameters["weight"]
    assert set(convert(model, RawStore).left) == {"b"}


@pytest.mark.parametrize("cls", [nn.Linear, Conv1D])
def test_the_output_of_a_stored_layer_may_be_changed_in_place(cls):
    plain = nn.Sequential(nn.Tanh(), cls(6, 6))
    model = copy.deepcopy(plain)
    convert(model, RawStore)
    model[1].stored.waits = True
    grads = []
    for one in (plain, model):
        x = torch.arange(12.0).view(2, 1, 6).requires_grad_()
        y = one(x)
        y += x
        y.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_a_weight_that_the_parent_multiplies_by_itself_is_an_error_that_names_the_layer_and_the_remedy():
    model = architecture("mamba")
    convert(model, ZippedStore)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mixer\.dt_proj\.weight.*leave=\['dt_proj\.weight'\]"):
        model(**batch(0))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x @ w.T, lambda x, w: w @ x.T, lambda x, w: nn.functional.linear(x, w), lambda x, w: 2 * w,
        lambda x, w: w.float(), lambda x, w: torch.cat([w, w]), lambda x, w: w[0], lambda x, w: torch.mm(x, w),
    ],
)  # fmt: skip
def test_no_product_view_or_cast_of_a_stored_weight_is_taken_for_its_values(use):
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4))})
    convert(model, RawStore)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"a\.0\.weight is in a store.*leave=\['a\.0\.weight'\]"):
            use(torch.ones(2, 4), one["a"][0].weight)


def test_a_parent_may_ask_a_stored_weight_for_its_dtype_device_and_gradient_and_the_model_may_be_moved_and_cast():
    model = nn.Sequential(nn.Linear(4, 3))
    convert(model, RawStore)
    weight = model[0].weight
    assert (weight.dtype, weight.device.type, weight.grad) == (torch.float32, "cpu", None)
    assert isinstance(weight, torch.Tensor) and weight.requires_grad and weight.is_floating_point()
    model.bfloat16().to("cpu")
    assert model[0].weight.dtype == torch.bfloat16 and model(torch.ones(1, 4, dtype=torch.bfloat16)).shape == (1, 3)
    with pytest.raises(RuntimeError, match=r"0\.weight is in a store"):
        model[0].weight.sum()


def test_experts_that_stay_plain_are_listed_with_their_sizes_and_share_of_the_model():
    model = architecture("mixtral")
    sizes = {name: p.shape for name, p in model.named_parameters()}
    total = sum(p.numel() for p in model.parameters())
    done = convert(model, CodedStore)
    assert done.plain == {n: tuple(s) for n, s in sizes.items() if len(s) > 1 and n not in done.names}
    assert done.plain["model.layers.0.mlp.experts.gate_up_proj"] == (4, 96, 32)
    assert done.parameters == total
    assert done.plain_share == sum(sizes[n].numel() for n in done.plain) / total > 0.7
    (line,) = (line for line in str(done).splitlines() if line.startswith("left plain"))
    assert f"8 parameters of two and more dimensions, {done.plain_share:.1%} of all values" in line
    assert "model.layers.0.mlp.experts.gate_up_proj (4 x 96 x 32)" in line and "and 4 more" in line


def test_nothing_is_said_to_stay_plain_where_all_is_stored_and_tied_weights_count_once():
    done = convert(build("llama", tie_word_embeddings=True), RawStore, "all")
    assert done.plain == {} and done.plain_share == 0 and done.parameters == done.weights + 5 * 32
    assert str(done) == f"stored: 15 parameters, {done.weights:,} values, 16.00 bits each"


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.01


class Rounding(nn.Linear):
    """To eight bits, which the roundings of bfloat16 would hide."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


class Dropping(nn.Linear):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Frozen(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach(), self.bias)


class Failing(nn.Linear):
    def forward(self, x):
        raise KeyError("no such thing")


class Gated(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gate = nn.Parameter(torch.ones(1))


class Asked(nn.Linear):
    def rank(self):
        return 3


class Writing(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return y


OTHERS = [Scaled, Rounding, Dropping, Counting, Frozen, Failing, Gated, Asked, Writing]


@pytest.mark.parametrize("cls", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_subclass_that_is_more_than_a_linear_layer_stays_as_it_is_and_is_named(cls, dtype):
    model = nn.Sequential(nn.Linear(16, 16), cls(16, 16)).to(dtype)
    layer, before, state = model[1], copy.deepcopy(model[1]), torch.get_rng_state()
    done = convert(model, RawStore)
    assert model[1] is layer and done.names == ("0.weight",) and done.left.keys() == {"1"}
    assert f"1 ({done.left['1']})" in str(done) and done.plain == {"1.weight": (16, 16)}
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(layer.weight, before.weight)
    assert vars(layer).keys() == vars(before).keys() and layer.weight.grad is None
    with pytest.raises(ValueError, match=r"no layer to store.*left: 0 \("):
        convert(nn.Sequential(layer), RawStore)


def test_a_subclass_of_torch_or_of_a_library_is_left_since_others_read_its_weight():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "out": nn.Linear(8, 8)})
    plain = copy.deepcopy(model)
    done = convert(model, RawStore)
    x = torch.randn(3, 1, 8)
    assert done.names == ("out.weight",) and "torch" in done.left["attention.out_proj"]
    assert torch.equal(model["attention"](x, x, x)[0], plain["attention"](x, x, x)[0])


class Named(nn.Linear):
    """As Falcon's, and with something that its model asks for."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.heads = 4

    def forward(self, x):
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_subclass_that_is_a_linear_layer_is_stored_and_keeps_what_its_model_asks_it_for(bias, dtype):
    model = nn.Sequential(Named(300, 70, bias=bias)).to(dtype).eval()
    assert convert(model, RawStore).left == {}
    assert isinstance(model[0], StoredLinear) and not model[0].training
    assert (model[0].heads, model[0].in_features, model[0].out_features) == (4, 300, 70)


def test_a_subclass_whose_weight_was_taken_out_and_put_back_behind_its_bias_is_stored():
    model = nn.Sequential(Named(16, 8))
    weight = model[0].weight
    del model[0].weight
    model[0].weight = weight
    assert list(model[0]._parameters) == ["bias", "weight"] and convert(model, RawStore).left == {}


def test_a_subclass_whose_weight_is_no_matrix_is_left_with_the_reason():
    model = nn.Sequential(nn.Linear(8, 8), Named(8, 8))
    model[1].weight = nn.Parameter(torch.zeros(64))
    assert convert(model, RawStore).left == {"1": "its weight is a Parameter of torch.float32 and shape (64,)"}


def test_importing_the_stores_draws_nothing_from_a_seeded_generator():
    code = (
        "import torch; torch.manual_seed(0); before = torch.get_rng_state(); import paperlm_kernels.stored; "
        "assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=job_environment())


def test_what_a_weight_has_none_of_is_asked_for_as_of_any_parameter_and_products_by_other_names_are_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model, RawStore)
    weight = model[0].weight
    with pytest.raises(AttributeError, match="__cuda_array_interface__"):
        weight.__cuda_array_interface__  # noqa: B018
    for function in (torch.multiply, torch.divide, torch.subtract, torch.true_divide):
        with pytest.raises(RuntimeError, match=r"0\.weight is in a store"):
            function(weight, 2.0)
    with pytest.raises(RuntimeError, match=r"0\.weight is in a store"):
        torch.concatenate([torch.ones(1), weight])


@pytest.mark.parametrize("size", SIZES)
def test_of_our_decoder_of_every_size_the_matrices_of_the_blocks_are_stored_and_its_head_is_not(size):
    shape = SIZES[size]
    with torch.device("meta"):
        model = PaperLlamaForCausalLM(
            PaperLlamaConfig(
                hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
                num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
            )
        )  # fmt: skip
    chosen = chosen_weights(model)
    assert len(chosen) == 7 * shape.n_layers and all(".layers." in name for name in chosen)
    of_a_block = 4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.intermediate_size
    assert sum(weight.numel() for weight in chosen.values()) == shape.n_layers * of_a_block
    head = {"lm_head.weight"}
    assert chosen_weights(model, "all_linear").keys() - chosen.keys() == head
    assert chosen_weights(model, "all").keys() - chosen.keys() == head | {"model.embed_tokens.weight"}


def test_what_would_be_stored_of_a_model_without_values_is_what_is_stored_of_one_with_them():
    model = nn.Sequential(Named(6, 4), Scaled(6, 4), nn.Linear(6, 4))
    with torch.device("meta"):
        empty = nn.Sequential(Named(6, 4), Scaled(6, 4), nn.Linear(6, 4))
    assert list(chosen_weights(empty)) == list(chosen_weights(model)) == ["0.weight", "2.weight"]
    assert not isinstance(model[0], StoredLinear)
