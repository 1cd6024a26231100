"""Layers with stored weights in the place of plain ones: products, gradients, conversion, and files."""

from __future__ import annotations

import copy
import tracemalloc
from functools import partial

import pytest
import torch
from paperlm_kernels.neuzip import pack
from paperlm_kernels.stored import (
    LomoSgd,
    PackedStore,
    RawStore,
    RowBlocks,
    StoredConv1D,
    StoredEmbedding,
    StoredLinear,
    convert,
    model_hash,
    plain_tensors,
    read_packed,
    save_packed,
    stored_weights,
)
from paperlm_kernels.stored.files import _digest
from paperlm_kernels.stored.weight import StoredWeight
from safetensors import safe_open
from safetensors.torch import save_file
from support_stored import MODELS, STORES, CodedStore, ZippedStore, batch, build
from torch import nn

BF16 = torch.bfloat16


class Collected(LomoSgd):
    """An optimizer that keeps the gradients for the test, by the rate 0."""

    def __init__(self, model):
        super().__init__(model, 0.0, fused=False)


@pytest.mark.parametrize("store", [RawStore, *STORES], ids=lambda s: s.__name__)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_takes_inputs_of_any_number_of_axes_with_and_without_a_bias(store, lead, bias):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 6, bias=bias)).to(BF16)
    model = copy.deepcopy(plain)
    convert(model, store)
    Collected(model)
    x, g = torch.randn(*lead, 8, dtype=BF16), torch.randn(*lead, 6, dtype=BF16)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [one(i) for one, i in zip((plain, model), inputs, strict=True)]
    for y in ys:
        y.backward(g)
    assert torch.equal(*ys) and isinstance(model[0], StoredLinear)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(model[0].stored.gradient, plain[0].weight.grad)
    if bias:
        torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad)


def test_a_conv1d_layer_is_that_of_gpt2():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(1)
    plain = nn.Sequential(Conv1D(6, 8))
    nn.init.normal_(plain[0].bias)
    model = copy.deepcopy(plain)
    convert(model, RawStore)
    Collected(model)
    x = torch.randn(2, 3, 8)
    assert isinstance(model[0], StoredConv1D) and torch.equal(model(x), plain(x))
    for one in (plain, model):
        one(x).square().sum().backward()
    torch.testing.assert_close(model[0].stored.gradient, plain[0].weight.grad)
    torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_autocast_computes_in_its_dtype_and_gives_the_input_its_own_back(dtype):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 6)).to(dtype)
    model = copy.deepcopy(plain)
    convert(model, RawStore)
    Collected(model)
    inputs = [torch.ones(2, 3, 8, requires_grad=True) for _ in range(2)]
    for one, x in zip((plain, model), inputs, strict=True):
        with torch.autocast("cpu", BF16):
            y = one(x)
        assert y.dtype == BF16
        y.float().square().sum().backward()
    assert inputs[1].grad.dtype == torch.float32
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad)
    with torch.autocast("cpu", BF16):
        assert torch.equal(plain(inputs[0]), model(inputs[0]))


def test_an_input_of_another_dtype_is_refused_as_by_a_plain_layer():
    model = nn.Sequential(nn.Linear(8, 6)).to(BF16)
    convert(model, RawStore)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(2, 8))


def test_an_embedding_decodes_and_writes_only_blocks_that_hold_a_requested_row(monkeypatch):
    plain = nn.Sequential(nn.Embedding(10, 4))
    model = copy.deepcopy(plain)
    convert(model, ZippedStore, "all")
    store = RowBlocks(plain[0].weight, ZippedStore, 3)
    model[0].stored.store = store
    reads, writes = [], []
    read, write = ZippedStore.read, ZippedStore.write
    monkeypatch.setattr(ZippedStore, "read", lambda s: (reads.append(store.blocks.index(s)), read(s))[1])
    monkeypatch.setattr(ZippedStore, "write", lambda s, t: (writes.append(store.blocks.index(s)), write(s, t))[1])
    LomoSgd(model, 0.5)
    ids = torch.tensor([[9, 0], [2, 0]])
    y = model(ids)
    assert torch.equal(y, plain(ids)) and reads == [0, 3]
    y.square().sum().backward()
    plain(ids).square().sum().backward()
    assert writes == [0, 3]
    torch.testing.assert_close(store.read(), (plain[0].weight - 0.5 * plain[0].weight.grad).detach())
    assert isinstance(model[0], StoredEmbedding)
    with pytest.raises(IndexError, match="of a weight that has 10"):
        model(torch.tensor([10]))


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_gradients_of_a_row_that_is_used_often_are_added_in_the_order_of_the_uses_on_every_device(device):
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 7, (600,), generator=g) ** 2  # 4 and 16 among them 90 times, and gaps
    gradients = torch.randn(600, 40, generator=g).to(BF16)
    sums = {}
    for row, gradient in zip(ids.tolist(), gradients.float(), strict=True):
        sums[row] = sums.get(row, torch.zeros(40)) + gradient
    weight = StoredWeight(RawStore(torch.zeros(50, 40, dtype=BF16, device=device)))
    weight.waits = True
    for part in (slice(0, 250), slice(250, 600)):  # two uses of the embedding
        weight.receive_rows(ids[part].to(device), gradients[part].to(device))
    rows, found = weight._summed_rows()
    assert rows.tolist() == sorted(sums)
    assert torch.equal(found.cpu(), torch.stack([sums[row] for row in sorted(sums)]).to(BF16))


@pytest.mark.parametrize("padding", [2, 0])
def test_the_padding_row_of_an_embedding_is_never_trained(padding):
    plain = nn.Sequential(nn.Embedding(6, 4, padding_idx=padding))
    model = copy.deepcopy(plain)
    convert(model, RawStore, "all")
    LomoSgd(model, 0.5)
    model(torch.tensor([padding, 3, padding])).sum().backward()
    changed = (plain_tensors(model)["0.weight"] != plain[0].weight).any(1)
    assert changed.tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("name", MODELS)
def test_the_default_policy_leaves_head_embeddings_norms_and_biases(name):
    model = build(name)
    before = {n: p for n, p in model.named_parameters()}
    done = convert(model, RawStore)
    kept = {n for n, p in model.named_parameters() if p.numel()}
    assert kept == before.keys() - set(done.names)
    assert all(p.ndim == 1 or any(w in n for w in ("embed", "shared", "wte", "wpe", "lm_head", "relative"))
               for n, p in before.items() if n in kept)  # fmt: skip
    assert done.bytes_after == done.bytes_before == 2 * done.weights


def test_the_other_policies_store_the_head_and_the_embeddings():
    names = {policy: set(convert(build("llama"), RawStore, policy).names) for policy in ("paper", "all_linear", "all")}
    assert names["all_linear"] - names["paper"] == {"lm_head.weight"}
    assert names["all"] - names["all_linear"] == {"model.embed_tokens.weight"}
    with pytest.raises(ValueError, match="paper, all_linear, all"):
        convert(build("llama"), RawStore, "everything")


def test_tied_layers_share_a_store_and_one_of_them_alone_is_refused():
    with pytest.raises(ValueError, match=r"lm_head.weight is tied to model.embed_tokens.weight.*policy 'all'"):
        convert(build("llama", tie_word_embeddings=True), RawStore, "all_linear")
    model = build("llama", tie_word_embeddings=True)
    convert(model, ZippedStore, "all")
    assert model.lm_head.stored is model.model.embed_tokens.stored
    assert len(stored_weights(model)) == 15


def test_a_model_without_layers_to_store_or_with_hooks_on_them_is_refused():
    with pytest.raises(ValueError, match="no layer to store"):
        convert(nn.Sequential(nn.Tanh()), RawStore)
    model = nn.Sequential(nn.Linear(64, 64))
    convert(model, RawStore)
    with pytest.raises(ValueError, match=r"no layer to store .*: 1 weights of the model are stored already"):
        convert(model, RawStore)
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks, which would be lost"):
        convert(model, RawStore)
    with pytest.raises(ValueError, match="meta device"):
        convert(nn.Sequential(nn.Linear(2, 2, device="meta")), RawStore)
    with pytest.raises(TypeError, match=r"model.bfloat16\(\) before convert"):
        convert(nn.Sequential(nn.Linear(2, 2)), PackedStore)


def test_another_dtype_is_refused_by_a_store_that_has_one_and_taken_by_raw_weights():
    packed, raw = build("llama"), build("llama")
    convert(packed, ZippedStore)
    convert(raw, RawStore)
    with pytest.raises(TypeError, match="before convert"):
        packed.float()
    packed.to(torch.bfloat16)(**batch(0))  # as the error says: what was cast before it was refused comes back
    assert raw.float()(**batch(0)).logits.dtype == torch.float32
    moved = build("llama")
    convert(moved, ZippedStore)
    assert moved.to("cpu")(**batch(0)).logits.dtype == BF16


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["paper", "all"])
def test_a_state_dict_has_the_plain_values_and_loads_into_plain_and_stored_models(name, policy):
    model, plain, other = build(name), build(name, seed=3), build(name, seed=4)
    convert(model, ZippedStore, policy)
    convert(other, RawStore, policy)
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state)
    other.load_state_dict(state)
    assert model_hash(plain) == model_hash(model) == model_hash(other)
    short = dict(list(state.items())[:-1])
    del short[next(key for key in state if key.endswith("weight") and key in {n for n in stored_weights(other)})]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(short)


def test_save_pretrained_writes_a_folder_that_loads_as_any_other(tmp_path):
    model = build("llama")
    convert(model, ZippedStore)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=BF16)
    assert model_hash(again) == model_hash(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["paper", "all"])
def test_a_compressed_file_loads_into_plain_and_stored_models(tmp_path, name, policy):
    model, plain, other = build(name), build(name, seed=3), build(name, seed=4)
    convert(model, CodedStore, policy)
    convert(other, PackedStore, policy)
    save_packed(model, tmp_path / "model.safetensors")
    found = dict(read_packed(tmp_path / "model.safetensors"))
    for one in (plain, other):
        _, unexpected = one.load_state_dict(found, strict=False)
        assert not unexpected and model_hash(one) == model_hash(model)


def test_a_model_that_is_saved_twice_gives_the_same_bytes(tmp_path):
    model = build("llama")
    convert(model, CodedStore)
    saved = []
    for place in range(4):  # the library's own order differs from file to file
        save_packed(model, tmp_path / f"{place}.safetensors")
        saved.append((tmp_path / f"{place}.safetensors").read_bytes())
    assert len(set(saved)) == 1


def test_a_file_that_is_damaged_or_another_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    model = build("llama")
    with pytest.raises(ValueError, match="no weight of the model is packed"):
        save_packed(model, path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="not written by save_packed"):
        list(read_packed(path))
    convert(model, PackedStore)
    save_packed(model, path)
    data = bytearray(path.read_bytes())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="truncated"):
        list(read_packed(path))


def test_no_byte_of_a_compressed_file_can_change_unseen(tmp_path):
    """Of its header, of a container, of a plain weight."""
    path = tmp_path / "model.safetensors"
    model = build("llama")
    convert(model, CodedStore)
    save_packed(model, path)
    data = path.read_bytes()
    whole = dict(read_packed(path))
    assert whole.keys() >= {"lm_head.weight", "model.norm.weight"}
    head = data.index(model.lm_head.weight.detach().view(torch.uint8).numpy().tobytes()[:64])
    for at in [*range(0, len(data), len(data) // 40), data.index(b"x32"), head]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match=r"model\.safetensors: .*save the model again"):
            list(read_packed(path))


def forged(path, **changes):
    """The file with other metadata and tensors, and a SHA-256 that fits."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in names}
    metadata.pop("sha256")
    metadata |= {key: value for key, value in changes.items() if isinstance(value, str)}
    tensors |= {key: value for key, value in changes.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, path, metadata | {"sha256": _digest(metadata, tensors, tensors.__getitem__)})


def test_blocks_of_a_weight_that_are_of_several_dtypes_are_refused(tmp_path):
    """Put together they would be another dtype's: PyTorch takes the wider one."""
    path = tmp_path / "model.safetensors"
    model = nn.Sequential(nn.Linear(32, 24, bias=False)).bfloat16()
    convert(model, CodedStore, "all")
    save_packed(model, path)
    parts = {}
    for index, dtype in enumerate((BF16, torch.float16)):
        container = pack(torch.randn(12, 32).to(dtype)).to_bytes()
        parts[f"0.weight.{index}"] = torch.frombuffer(bytearray(container), dtype=torch.uint8)
    forged(path, **{"packed:0.weight": "2 24x32"}, **parts)
    with pytest.raises(ValueError, match=r"blocks of 0\.weight are of several dtypes"):
        list(read_packed(path))


@pytest.mark.parametrize(
    "described",
    ["1000000 24x32", f"{10**15} 24x32", "1e400 24x32", "1_0 24x32", "+1 24x32", "0 24x32", "-1 24x32", "true 24x32",
     "\u0661 24x32", "1 24.0x32", "1 -24x-32", f"1 0x{2**62}x4", f"1 0x{2**63}", "1 " + "9" * 5000, "1", "", "1 24x"],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_blocks_and_sizes_in_metadata_that_the_file_does_not_have_are_refused_at_once(described, tmp_path):
    path = tmp_path / "model.safetensors"
    model = nn.Sequential(nn.Linear(32, 24, bias=False)).bfloat16()
    convert(model, CodedStore, "all")
    save_packed(model, path)
    forged(path, **{"packed:0.weight": "1 24x32"})
    assert [name for name, _ in read_packed(path)] == ["0.weight"]
    forged(path, **{"packed:0.weight": described})
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"model\.safetensors: .*0\.weight .*save the model again"):
        list(read_packed(path))
    assert tracemalloc.get_traced_memory()[1] < 4_000_000  # a million names are more than 50
    tracemalloc.stop()


def test_a_weight_that_is_there_twice_is_refused_whatever_was_sealed(tmp_path):
    path = tmp_path / "model.safetensors"
    model = nn.Sequential(nn.Linear(32, 24, bias=False)).bfloat16()
    convert(model, CodedStore, "all")
    save_packed(model, path)
    whole = path.read_bytes()
    forged(path, **{"0.weight": torch.zeros(24, 32)})
    with pytest.raises(ValueError, match=r"model\.safetensors: 0\.weight is there both packed and plain"):
        list(read_packed(path))
    forged(path, **{"0.weight": torch.zeros(0), "0.weight.0": torch.zeros(24, 32)})
    with pytest.raises(ValueError, match="both packed and plain"):
        list(read_packed(path))
    path.write_bytes(whole)
    forged(path, **{"0.weight.0": torch.zeros(24, 32, dtype=BF16)})
    with pytest.raises(ValueError, match=r"0\.weight\.0 is of torch\.bfloat16, not the bytes of a container"):
        list(read_packed(path))
    forged(path, **{"0.weight.0": torch.zeros(200, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"model\.safetensors: 0\.weight\.0 is no container"):
        list(read_packed(path))
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length].decode().rstrip()
    for one in ('"packed:0.weight":"1 24x32"', header[header.index('"0.weight.0"') : -1]):
        twice = header.replace(one, f"{one},{one}").encode()
        path.write_bytes(len(twice).to_bytes(8, "little") + twice + whole[8 + length :])
        with pytest.raises(ValueError, match="is there twice"):
            list(read_packed(path))


def test_the_hash_of_a_model_is_of_every_parameter():
    model = build("gpt_neo")
    convert(model, RawStore)
    hashes = {model_hash(model)}
    for values in plain_tensors(model).values():
        values.view(-1)[-1] += 1
        hashes.add(model_hash(model))
    assert len(hashes) == 1 + len(plain_tensors(model))


def test_rounded_weights_take_fewer_bits_and_compute_what_their_values_compute():
    model, plain = build("llama", hidden_size=192).eval(), build("llama", hidden_size=192).eval()
    done = convert(model, partial(PackedStore, mant_bits=3, block_norm=512))
    plain.load_state_dict(model.state_dict())
    assert done.bytes_after < done.bytes_before
    assert torch.equal(model(**batch(0)).logits, plain(**batch(0)).logits)
    assert not torch.equal(build("llama", hidden_size=192).eval()(**batch(0)).logits, plain(**batch(0)).logits)
