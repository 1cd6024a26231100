"""Checkpoints of BitNet b1.58 from elsewhere, by their names and their forward pass, written out here a second time."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support_bitnet import bitnet_folder
from support_probe import file_entry, register

from paperlm.data.model_files import ModelData, prepare_model_files
from paperlm.errors import JobError
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.hub_model import HubModel, run
from paperlm.models.bitnet_checkpoint import read_checkpoint
from paperlm.models.folder import load_model, load_tokenizer, transformers_tokenizer

D, FFN, HEADS, LAYERS, VOCAB = 24, 40, 2, 2, 1026
CONFIG = {
    "architectures": ["BitnetForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "auto_map": {"AutoModelForCausalLM": "modeling_bitnet.BitnetForCausalLM"}, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": D, "initializer_range": 0.02, "input_bits": 8, "intermediate_size": FFN, "model_type": "llama",
    "max_position_embeddings": 64, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "pad_token_id": 1024,
    "num_key_value_heads": HEADS, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "vocab_size": VOCAB,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float16", "transformers_version": "4.39.0",
    "use_cache": True, "weight_bits": 1,
}  # fmt: skip
IDS = torch.tensor([[5, 9, 2, 77, 1025, 3]])


def weights():
    shapes = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}self_attn.{n}_proj.weight": (D, D) for n in "qkvo"}
        shapes |= {f"{block}mlp.{n}_proj.weight": (FFN, D) for n in ("gate", "up")}
        shapes |= {f"{block}mlp.down_proj.weight": (D, FFN), f"{block}mlp.ffn_layernorm.weight": (FFN,)}
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.inner_attn_ln")
        shapes |= {f"{block}{n}.weight": (D,) for n in norms}
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.3 * n if n.ndim == 1 else n for name, n in noise.items()}


def forward_by_hand(w, ids):
    """float64: each linear layer quantizes its own weight and input, as the checkpoint's layers do."""
    w = {name: weight.double() for name, weight in w.items()}
    rms = lambda u, name: w[name] * u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt()  # noqa: E731

    def bit_linear(u, name):
        weight = w[name + "_proj.weight"]
        scale = weight.abs().mean()
        gamma = u.abs().amax(-1, keepdim=True)
        return ((u * 127 / gamma).round() * gamma / 127) @ ((weight / scale).round().clamp(-1, 1) * scale).T

    x = w["model.embed_tokens.weight"][ids]
    half = D // HEADS // 2
    angle = torch.outer(torch.arange(ids.shape[1]), 1e4 ** (-torch.arange(half, dtype=torch.float64) / half))
    cos, sin = angle.cos().float().double(), angle.sin().float().double()
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        h = rms(x, block + "input_layernorm.weight")
        q, k, v = (bit_linear(h, f"{block}self_attn.{n}").unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
        q, k = (torch.cat((z[..., :half] * cos - z[..., half:] * sin, z[..., half:] * cos + z[..., :half] * sin), -1)
                for z in (q, k))  # fmt: skip
        scores = q @ k.transpose(-1, -2) / math.sqrt(2 * half)
        scores = scores.masked_fill(torch.ones(*scores.shape[-2:]).triu(1).bool(), -math.inf)
        a = rms((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), block + "self_attn.inner_attn_ln.weight")
        x = x + bit_linear(a, block + "self_attn.o")
        h = rms(x, block + "post_attention_layernorm.weight")
        z = F.silu(bit_linear(h, block + "mlp.gate")) * bit_linear(h, block + "mlp.up")
        x = x + bit_linear(rms(z, block + "mlp.ffn_layernorm.weight"), block + "mlp.down")
    return rms(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as these checkpoints are, with code that must not run; the tokenizer has two ids more."""
    folder = tmp_path / "local/models/bitnet"
    tokenizer = transformers_tokenizer("bpe1024", 64)
    tokenizer.add_tokens(["<line>", "</line>"])
    tokenizer.save_pretrained(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "BitnetTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_bitnet.X", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | own))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")
    return folder


def made(tmp_path, monkeypatch, folder, **entry):
    """What a hub_model job makes of a folder below local_data."""
    files = [file_entry(path, tmp_path / "local") for path in sorted(folder.iterdir())]
    entry = {"source": "local", "architecture": "BitnetForCausalLM", "files": files} | entry
    register(monkeypatch, toy=entry)
    manifest = prepare_model_files(ModelData(model="local:toy"), tmp_path / "data", str(tmp_path / "local"))
    target = tmp_path / "made"
    target.mkdir(exist_ok=True)
    found = run(
        HubModel(name="local:toy"), Inputs(data=(manifest,), work=tmp_path, model=target), Machine(device="cpu")
    )
    return found, target


def test_a_checkpoint_of_b158_computes_what_its_own_layers_compute(tmp_path, monkeypatch, checkpoint):
    found, target = made(tmp_path, monkeypatch, checkpoint)
    tied = sum(weight.numel() for weight in weights().values())
    assert found.metrics == {"parameters": tied, "blocks": LAYERS}
    model = load_model(target)
    assert model.dtype == torch.float32 and model.config.pad_token_id == 1024
    torch.testing.assert_close(model.double()(IDS).logits, forward_by_hand(weights(), IDS), rtol=1e-9, atol=1e-9)
    text = "Some text</line>"
    assert load_tokenizer(target).encode(text)[-1] == 1025
    assert load_tokenizer(target).decode(load_tokenizer(target).encode(text)) == text


def test_a_checkpoint_is_read_in_the_dtype_of_its_weights(checkpoint):
    change(checkpoint, lambda state: state.update({name: weight.bfloat16() for name, weight in state.items()}))
    model, _ = read_checkpoint(checkpoint)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_checkpoint_in_several_files_is_read_whole(tmp_path, monkeypatch, checkpoint):
    state = weights()
    (checkpoint / "model.safetensors").unlink()
    for part in range(2):
        name = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({n: w for i, (n, w) in enumerate(state.items()) if i % 2 == part}, checkpoint / name)
    _, target = made(tmp_path, monkeypatch, checkpoint)
    torch.testing.assert_close(load_model(target).double()(IDS).logits, forward_by_hand(state, IDS))


def change(folder, alter):
    state = load_file(folder / "model.safetensors")
    alter(state)
    save_file(state, folder / "model.safetensors")


def configure(folder, without=None, **keys):
    described = {key: value for key, value in (CONFIG | keys).items() if key != without}
    (folder / "config.json").write_text(json.dumps(described))


FIRST = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: configure(f, input_bits=4), "input_bits is 4; 8 is what BitNet b1.58 has"),
        (lambda f: configure(f, weight_bits=2), "weight_bits is 2"),
        (lambda f: configure(f, without="input_bits"), "input_bits is None; 8 is what BitNet b1.58 has"),
        (lambda f: configure(f, num_key_value_heads=1), "num_key_value_heads: 1 is not implemented"),
        (lambda f: configure(f, hidden_act="gelu"), "hidden_act: 'gelu' is not implemented"),
        (lambda f: configure(f, architectures=["BitNetForCausalLM"]), "hold a BitNetForCausalLM, the registry"),
        (lambda f: (f / "config.json").write_text("{"), "no checkpoint of BitNet b1.58 that the decoder can be"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list, not a model's settings by name"),
        (lambda f: configure(f, hidden_size=48), "no checkpoint of BitNet b1.58 that the decoder can be"),
        (lambda f: change(f, lambda s: s.pop(FIRST)), "do not fit BitnetForCausalLM: model.layers.0.attention.q"),
        (lambda f: change(f, lambda s: s.update({"model.layers.2.x": s[FIRST].clone()})), "do not fit .*layers.2.x"),
        (lambda f: change(f, lambda s: s.update({FIRST: s[FIRST].to(torch.uint8)})), "uint8: packed weights"),
        (lambda f: change(f, lambda s: s.update({"lm_head.weight": torch.zeros(VOCAB, D)})), "is not the embedding"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 40), "no weights that safetensors can read"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_no_b158_is_refused_with_the_reason(tmp_path, monkeypatch, checkpoint, damage, says):
    damage(checkpoint)
    with pytest.raises(JobError, match=says):
        made(tmp_path, monkeypatch, checkpoint)
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize("packed", [False, True], ids=["latent", "packed"])
def test_a_bitnet_folder_of_ours_is_a_model_from_elsewhere_too(tmp_path, monkeypatch, packed):
    folder = bitnet_folder(tmp_path / "local/models/ours", packed=packed)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    found, target = made(tmp_path, monkeypatch, folder, architecture="PaperLlamaForCausalLM")
    assert found.metrics["blocks"] == 2
    assert torch.equal(load_model(target)(IDS[:, :4]).logits, load_model(folder)(IDS[:, :4]).logits)
