"""Models with weights in two bits: the latent model's numbers, folders, other tools, and what is refused."""

import json
import shutil

import pytest
import torch
from paperlm_kernels.ternary_linear import pack_ternary
from safetensors.torch import load_file, save_file
from support_bitnet import QUANTIZED, bitnet, bitnet_folder
from support_model import tokens
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from paperlm.errors import JobError, SpecError
from paperlm.models.decoding import PackedDecoder
from paperlm.models.folder import load_model, load_tokenizer
from paperlm.models.llama import PaperLlamaForCausalLM
from paperlm.models.packed import PackedLinear, pack

FIRST = "model.layers.0.attention.q_proj"


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return bitnet_folder(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return bitnet_folder(tmp_path_factory.mktemp("packed"), packed=True)


@pytest.fixture
def copy(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "model")


# --- the same numbers ---


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("preset", QUANTIZED)
def test_packed_weights_give_the_latent_models_logits_to_the_last_bit(preset, tied):
    model, ids = bitnet(preset, tie_word_embeddings=tied), tokens()
    small = pack(model)
    assert sum(isinstance(module, PackedLinear) for module in small.modules()) == 14
    assert torch.equal(small(ids).logits, model(ids).logits)
    assert torch.equal(small.token_losses(ids, ids), model.token_losses(ids, ids))


def test_the_packed_codes_are_the_signs_of_what_is_large_and_the_scale_is_the_mean():
    """The layout by its definition: byte j of a row's first 32 has the codes of k = j, 32 + j, 64 + j and 96 + j."""
    model = bitnet(hidden_size=160, intermediate_size=36, num_attention_heads=2)
    weight, small = model.get_parameter(f"{FIRST}.weight").detach(), pack(model).get_submodule(FIRST)
    mean = weight.double().abs().mean()
    torch.testing.assert_close(small.weight_scale.double(), mean, rtol=1e-6, atol=0)
    large = weight.abs() > mean / 2
    for row, k in [(0, 0), (3, 31), (5, 32), (7, 100), (11, 127), (13, 128), (159, 159)]:
        byte = int(small.weight[row, 32 * (k // 128) + k % 32])
        assert (byte >> 2 * (k % 128 // 32) & 3) - 1 == int(weight[row, k].sign()) * int(large[row, k])


def test_packed_and_latent_folders_write_the_same_tokens(latent, packed):
    prompt = load_tokenizer(packed)(["The cat sat", "Rain on the"], return_tensors="pt", padding=True)
    written = [
        AutoModelForCausalLM.from_pretrained(folder).generate(
            input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=24, do_sample=False
        )
        for folder in (latent, packed)
    ]
    assert torch.equal(*written) and written[0].shape[1] > prompt["input_ids"].shape[1]


def test_a_packed_folder_takes_an_eighth_of_the_weights_room_in_bfloat16(tmp_path):
    model = bitnet(hidden_size=256, intermediate_size=512, num_attention_heads=4, dtype=torch.bfloat16)
    for name, one in (("latent", model), ("packed", pack(model))):
        one.save_pretrained(tmp_path / name)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("latent", "packed")]
    blocks = 2 * (4 * 256**2 + 3 * 256 * 512)
    assert sizes[0] - sizes[1] == pytest.approx(blocks * (2 - 1 / 4), rel=0.01)


@pytest.mark.parametrize("change", [lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.double()])
def test_scales_stay_in_float32_when_the_model_changes_its_dtype(change, packed):
    model = load_model(packed)
    expected = model.get_submodule(FIRST).weight_scale.clone()
    changed = change(model).get_submodule(FIRST)
    assert torch.equal(changed.weight_scale, expected) and changed.weight_scale.dtype == torch.float32
    assert changed.weight.dtype == torch.uint8
    assert model(tokens()).logits.isfinite().all()


def test_scales_stay_in_float32_when_a_folder_is_loaded_in_bfloat16(packed):
    expected = load_model(packed).get_submodule(FIRST).weight_scale
    loaded = load_model(packed, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.get_submodule(FIRST).weight_scale, expected)


def test_a_packed_trunk_with_a_score_is_no_model_that_was_trained(packed):
    """A classifier's head is fresh, as of any language model's folder; its trunk stays packed."""
    model = AutoModelForSequenceClassification.from_pretrained(packed)
    assert isinstance(model.get_submodule(FIRST), PackedLinear) and not model.training


# --- other tools ---


def test_lm_eval_reads_a_packed_folder_and_finds_the_latent_models_likelihoods(latent, packed):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    found = []
    for folder in (latent, packed):
        lm = HFLM(pretrained=str(folder), device="cpu", batch_size=2)
        texts = [("The cat", " sat on the mat"), ("Two and two", " are four"), ("Rain", " falls")]
        requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(texts)]
        found.append(lm.loglikelihood(requests, disable_tqdm=True))
    assert found[0] == found[1] and all(likelihood < 0 for likelihood, _ in found[0])


@pytest.mark.slow
def test_trl_trains_latent_weights_and_refuses_packed_ones(latent, packed, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 2, "learning_rate": 1e-3}

    def trainer(folder):
        rows = datasets.Dataset.from_list([{"text": text} for text in ("The cat sat on the mat.", "Rain.", "Two.")])
        options = trl.SFTConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, **settings)
        return trl.SFTTrainer(str(folder), args=options, train_dataset=rows)

    training = trainer(latent)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    training.train()
    assert all((p != before[name]).any() for name, p in training.model.named_parameters())
    with pytest.raises(SpecError, match="cannot be trained: train the latent weights"):
        trainer(packed).train()


# --- what is refused ---


def test_packed_weights_refuse_to_be_trained(packed):
    model = load_model(packed)
    with pytest.raises(SpecError, match="cannot be trained: train the latent weights"):
        model.train()
    assert not model.training and model.eval() is model


def test_a_packed_model_is_not_initialized_at_random(packed):
    config = load_model(packed).config
    with pytest.raises(SpecError, match=r"without a weight of that shape or its weight_scale.*made of trained ones"):
        PaperLlamaForCausalLM(config)


def test_a_model_is_packed_once_and_only_if_its_products_are_of_whole_numbers():
    with pytest.raises(SpecError, match="packed already"):
        pack(pack(bitnet()))
    with pytest.raises(SpecError, match="only weights of the quantizer ternary_absmean"):
        pack(bitnet("llama"))
    with pytest.raises(SpecError, match="only weights of the quantizer ternary_absmean"):
        pack(bitnet(quantization={"qkv": "int8_absmax"}))
    partly = {"weight": "ternary_absmean", "qkv": "int8_absmax", "o": "int8_absmax", "gate_up": "int8_absmax"}
    with pytest.raises(SpecError, match="nothing quantizes the input `down`"):
        pack(bitnet(quantization=partly))


def weights(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def configuration(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def layout(folder, name, version):
    configuration(folder, packed_weights={"layout": name, "layout_version": version})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: weights(f, lambda s: s.pop(f"{FIRST}.weight_scale")),
            "24 x 24 without a weight of that shape or its weight_scale",
        ),
        (
            lambda f: weights(f, lambda s: s.update({f"{FIRST}.weight": s[f"{FIRST}.weight"][:64].clone()})),
            "24 x 24 without a weight of that shape",
        ),
        (
            lambda f: configuration(f, packed_weights={"layout": "planar-64", "layout_version": 1}),
            "planar-64.*planar-128",
        ),
        (
            lambda f: configuration(f, packed_weights={"layout": "planar-128", "layout_version": 2}),
            "pack latent weights",
        ),
        (lambda f: configuration(f, packed_weights=None), "no model that transformers can read|do not fit"),
        (lambda f: configuration(f, quantization=None), "only weights of the quantizer ternary_absmean"),
        (
            lambda f: configuration(f, hidden_size=48),
            "do not fit the model: model.embed_tokens.weight is .*, 24. and not .*, 48.",
        ),
    ],
    ids=["no scale", "another shape", "another layout", "another version", "latent", "no quantizers", "another width"],
)
def test_a_packed_folder_that_does_not_fit_is_refused_with_the_reason(copy, damage, message):
    damage(copy)
    with pytest.raises(JobError, match=message) as error:
        load_model(copy)
    assert str(copy) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[f"{FIRST}.weight"].fill_(255), "the code 3"),
        (lambda s: s[f"{FIRST}.weight"].fill_(0), "padding beyond 24 x 24 is not zero"),
        (lambda s: s[f"{FIRST}.weight_scale"].fill_(0), "with the scale 0.0"),
        (lambda s: s[f"{FIRST}.weight_scale"].fill_(float("nan")), "with the scale nan"),
    ],
)
def test_bytes_that_are_no_packed_weights_are_refused_at_the_first_use(copy, change, message):
    weights(copy, change)
    with pytest.raises(SpecError, match=message):
        load_model(copy)(tokens())


def test_weights_that_are_loaded_into_a_model_that_ran_are_looked_through_again():
    model, ids = pack(bitnet("a48_int4")), tokens()
    model(ids)
    state = model.state_dict()
    for name, value in ((f"{FIRST}.weight", 0xFF), (f"{FIRST}.weight_scale", float("nan"))):
        model.load_state_dict(state | {name: torch.full_like(state[name], value)})
        with pytest.raises(SpecError, match="packed weights"):
            model(ids)


def test_a_weight_that_is_no_number_is_not_packed():
    model = bitnet("a48_int4")
    with torch.no_grad():
        model.get_submodule(FIRST).weight[0, 0] = torch.nan
    with pytest.raises(SpecError, match="with the scale nan"):
        pack(model)


@pytest.mark.parametrize("whole", [pack, lambda model: PackedDecoder.of(model, batch=1, capacity=4)])
def test_a_part_of_a_matrix_is_neither_packed_nor_decoded_with(whole):
    """64 and 32 rows are kept in as many bytes, so that the rest would be zeros unseen."""
    cut, spread = bitnet("a48_int4"), bitnet("a48_int4")
    for name in ("gate_proj", "up_proj"):
        projection = cut.get_submodule(f"model.layers.0.mlp.{name}")
        projection.weight = torch.nn.Parameter(projection.weight[: len(projection.weight) // 2])
    with pytest.raises(SpecError, match=r"is here: .* gather them before"):
        whole(cut)
    weight = spread.get_parameter(f"{FIRST}.weight")
    weight.full_tensor = lambda: weight  # as of a DTensor, whose shape is the whole one
    with pytest.raises(SpecError, match="of which a shard is here"):
        whole(spread)


def test_a_packed_model_that_has_not_run_compiles_in_one_piece(packed):
    model, ids = load_model(packed), tokens()
    assert not model.get_submodule(FIRST).checked
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(ids).logits, model(ids).logits)


def test_a_product_in_16_bits_is_rounded_once_and_its_steps_are_not():
    layer, rows = PackedLinear(64, 200), 7
    g = torch.Generator().manual_seed(0)
    codes, t = torch.randint(-127, 128, (rows, 64), generator=g), torch.randint(-1, 2, (200, 64), generator=g)
    step = torch.rand(rows, 1, generator=g) * 0.01 + 0.01
    layer.weight.copy_(pack_ternary(t.char()).data)
    layer.weight_scale.fill_(0.0123)
    y = layer((codes * step).bfloat16(), codes, step)
    right = (codes.double() @ t.double().T) * step.double() * layer.weight_scale.double()
    assert y.dtype == torch.bfloat16
    assert ((y.double() - right).abs() <= 2.0**-8 * 1.001 * right.abs()).all()
