"""The image classifier: counts of parameters, another implementation, every method's equation, and its own file."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support_model import METHODS, SHARED, close, count, each
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from paperlm.errors import SpecError
from paperlm.models.layers import FeatureGroupNorm
from paperlm.models.sizes import VIT_SIZES
from paperlm.models.vit import PaperViTConfig, PaperViTForImageClassification

SHAPE = {"image_size": 6, "patch_size": 2, "num_channels": 2, "hidden_size": 24, "intermediate_size": 21}
SHAPE |= {"num_attention_heads": 3, "num_hidden_layers": 3, "num_labels": 5}
PRE, MIX = {"name": "pre_ln"}, {"name": "mix_ln", "post_layers": 2}


def model_of(norm, **options):
    """A small model with random weights in every tensor, float64."""
    depth = {"num_hidden_layers": 12} if norm.get("preset") == "authors_shared" else {}
    model = PaperViTForImageClassification(PaperViTConfig(**(SHAPE | depth | {"norm": norm} | options)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + (p.ndim == 1))
    return model.eval()


def images(n=3, seed=1):
    return torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("name", "parameters"), [("ViT-Tiny", 5_717_416), ("ViT-Small", 22_050_664)])
def test_the_published_shapes_have_the_parameters_of_deit_with_either_norm(name, parameters):
    """5.7 and 22 million in DeiT's Table 1; exact counts are those of its released models with 1,000 classes."""
    size = VIT_SIZES[name]
    for norm in (PRE, {"name": "mix_ln", "post_fraction": "1/4"}):
        config = PaperViTConfig(
            hidden_size=size.hidden_size, intermediate_size=size.intermediate_size, num_labels=1000,
            num_attention_heads=size.n_heads, num_hidden_layers=size.n_layers, norm=norm,
        )  # fmt: skip
        with torch.device("meta"):
            assert count(PaperViTForImageClassification(config)) == parameters == size.parameters


def theirs(model):
    """transformers' ViT with the model's weights."""
    config = ViTConfig(**SHAPE, layer_norm_eps=1e-6, qkv_bias=True, hidden_dropout_prob=0.0)
    other = ViTForImageClassification(config).to(model.dtype).eval()
    names = {
        "patches": "vit.embeddings.patch_embeddings.projection", "norm": "vit.layernorm", "classifier": "classifier",
        "class_token": "vit.embeddings.cls_token", "positions": "vit.embeddings.position_embeddings",
        "attention_residual.pre_norm": "layernorm_before", "mlp_residual.pre_norm": "layernorm_after",
        "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
    }  # fmt: skip
    state = {}
    for name, tensor in model.state_dict().items():
        prefix, _, rest = name.partition(".")
        if prefix == "layers":
            number, _, rest = rest.partition(".")
            module, _, last = rest.rpartition(".")
            state[f"vit.layers.{number}.{names.get(module, module)}.{last}"] = tensor
        else:
            state[names[prefix] + (f".{rest}" if rest else "")] = tensor
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_pre_ln_is_the_vit_of_transformers_outputs_and_gradients(dtype, tolerance):
    model = model_of(PRE).to(dtype)
    other, x, labels = theirs(model), images().to(dtype), torch.tensor([0, 3, 4])
    ours, reference = model(pixel_values=x, labels=labels), other(pixel_values=x, labels=labels)
    close(ours.logits, reference.logits, tolerance)
    close(ours.loss, reference.loss.float(), 2e-6)
    for logits in (ours.logits, reference.logits):
        F.cross_entropy(logits, labels).backward()
    close(model.positions.grad, other.vit.embeddings.position_embeddings.grad, tolerance)
    close(model.layers[0].mlp.up_proj.weight.grad, other.vit.layers[0].mlp.fc1.weight.grad, tolerance)


def test_mix_ln_is_post_ln_in_the_first_blocks_and_pre_ln_in_the_rest_with_a_final_norm():
    model, x = model_of(MIX), images()
    streams = list(model.streams(x))
    for index, block in enumerate(model.layers):
        stream, (a, m) = streams[index], (block.attention_residual, block.mlp_residual)
        norm = lambda u, n: F.layer_norm(u, (24,), n.weight, n.bias, 1e-6)  # noqa: E731
        if index < 2:
            y = norm(stream + block.attention(stream), a.out_norm)
            z = norm(y + block.mlp(y), m.out_norm)
        else:
            y = stream + block.attention(norm(stream, a.pre_norm))
            z = y + block.mlp(norm(y, m.pre_norm))
        close(streams[index + 1], z, 1e-12)
    close(model.logits(x), model.classifier(norm(streams[-1], model.norm)[:, 0]), 1e-12)


@each([*METHODS, *SHARED])
def test_every_method_wires_the_classifier_with_norms_that_have_a_bias_and_starts_it(norm):
    depth = {"num_hidden_layers": 12} if norm.get("preset") == "authors_shared" else {}
    torch.manual_seed(0)
    model = PaperViTForImageClassification(PaperViTConfig(**(SHAPE | depth | {"norm": norm})))
    for block in model.layers:
        norms = [m for m in block.modules() if isinstance(m, torch.nn.LayerNorm | FeatureGroupNorm)]
        assert len(norms) == {"sandwich_ln": 4, "peri_ln": 4, "siamese_norm": 6}.get(norm["name"], 2)
        assert all(bool((n.weight == 1).all() and (n.bias == 0).all()) for n in norms)
    model.config.method().initialize_from_batch(model, images().float())
    assert model(images().float()).logits.isfinite().all()


def test_scaled_initialization_reaches_the_output_projections_of_the_classifier():
    norm = {"name": "scaled_init", "base": PRE}
    wide = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 8, "norm": norm}
    torch.manual_seed(0)
    block = PaperViTForImageClassification(PaperViTConfig(**(SHAPE | wide))).layers[3]
    for module, std in (("up_proj", 0.02), ("down_proj", 0.02 / 16**0.5)):
        assert getattr(block.mlp, module).weight.std().item() == pytest.approx(std, rel=0.02)


def test_a_branch_that_is_dropped_leaves_the_stream_and_a_kept_one_is_scaled_up():
    """Stochastic depth by hand: image 0 loses both branches of block 2, image 1 the second; the rest counts 1/0.5."""
    model, x = model_of(PRE), images(2)
    kept = torch.ones(2, 3, 2, dtype=torch.float64)
    kept[:, 1] = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    streams = list(model.streams(x, kept))
    close(streams[2][0], streams[1][0], 0)
    residual = model.layers[1].attention_residual
    close(streams[2][1], streams[1][1] + 2 * model.layers[1].attention(residual.pre_norm(streams[1]))[1], 1e-12)
    close(model.logits(x, torch.ones_like(kept)), model.logits(x), 0)


def test_the_summed_loss_is_the_cross_entropy_with_probabilities_as_targets():
    model, x = model_of(MIX), images()
    targets = torch.rand(3, 5, dtype=torch.float64)
    targets = (targets / targets.sum(1, keepdim=True)).float()
    expected = -(targets * model.logits(x).float().log_softmax(1)).sum()
    close(model.summed_loss(x, targets), expected, 1e-6)


def test_a_saved_classifier_is_the_same_in_transformers_auto_class_with_names_of_its_classes(tmp_path):
    names = {index: name for index, name in enumerate("abcde")}
    options = {key: value for key, value in SHAPE.items() if key != "num_labels"}
    model = PaperViTForImageClassification(PaperViTConfig(**options, id2label=names, norm=MIX)).eval()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    again = AutoModelForImageClassification.from_pretrained(tmp_path, local_files_only=True)
    assert type(again) is PaperViTForImageClassification and again.config.id2label == names
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.config.method().describe() == model.config.method().describe()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 4}, "image_size 6 does not split into patches of 4 pixels"),
        ({"num_attention_heads": 5}, "hidden_size 24 does not split into 5 heads"),
        ({"norm": {"name": "mixln"}}, "unknown norm method 'mixln'; did you mean 'mix_ln'"),
        ({"norm": {"name": "mix_ln", "post_layers": 9}}, "mix_ln"),
        ({"patchsize": 2}, "unknown key of the model's configuration 'patchsize'; did you mean 'patch_size'"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_the_reason(change, message):
    with pytest.raises(SpecError, match=message):
        PaperViTForImageClassification(PaperViTConfig(**(SHAPE | change)))


def test_images_of_another_shape_are_refused():
    with pytest.raises(SpecError, match=r"images of shape \(2, 8, 8\); the model takes \(2, 6, 6\): resize them"):
        model_of(PRE)(torch.zeros(1, 2, 8, 8))
