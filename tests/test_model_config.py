"""Keys of a configuration: those of transformers that the decoder has are accepted, all others refused by name."""

import pytest
import torch
from support_model import (
    HEADS,
    LAYERS,
    MIX,
    WIDTH,
    config_of,
    model_of,
    randomize,
    tokens,
)

from paperlm.errors import SpecError
from paperlm.models.llama import (
    PaperLlamaConfig,
    PaperLlamaForCausalLM,
    PaperLlamaModel,
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 1),
        ("head_dim", 16),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("attention_dropout", 0.1),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_parameters", {"rope_theta": 1e4, "factor": 2.0}),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 128),
        ("layer_types", ["sliding_attention"] * LAYERS),
        ("per_layer_config", {"0": {"num_attention_heads": 1}}),
        ("is_causal", False),
        ("is_encoder_decoder", True),
        ("chunk_size_feed_forward", 4),
    ],
)
def test_a_key_that_is_not_implemented_is_refused_by_name(key, value):
    with pytest.raises(SpecError, match=key):
        PaperLlamaForCausalLM(config_of(MIX, **{key: value}))


@pytest.mark.parametrize("key", ["hidden_act", "attention_bias", "num_key_value_heads"])
def test_a_key_that_is_set_later_is_refused_when_the_model_is_built(key):
    config = config_of(MIX)
    setattr(config, key, "gelu")
    with pytest.raises(SpecError, match=key):
        PaperLlamaModel(config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantization": {"o": {"name": "int8_absmax", "keep": 0.3}}}, f"keep 0.3 of {WIDTH} entries"),
        ({"kv_cache": {"kv_bits": 2}}, "unknown kv_bits '2'"),
        ({"quantization": {"o": ["int8_absmax"]}}, "quantization.o: unknown quantizer of activations"),
        ({"sub_norm": "false"}, "sub_norm: 'false': true or false, without quotes"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no'"),
    ],
)
def test_quantizers_that_do_not_fit_are_refused_without_a_model(options, says):
    with pytest.raises(SpecError, match=says):
        config_of(MIX, **options).check()


def test_keys_of_llama_with_the_value_that_the_decoder_has_are_accepted():
    same = {
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    same |= {"attention_dropout": 0.0, "rope_scaling": None, "layer_types": ["full_attention"] * LAYERS}
    assert config_of(MIX, **same).to_dict() == config_of(MIX).to_dict()
    rope = config_of(MIX, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert rope.rope_theta == 500.0
    assert not torch.equal(model_of(MIX)(tokens()).logits, randomize(PaperLlamaForCausalLM(rope))(tokens()).logits)


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path):
    with pytest.raises(SpecError, match="did you mean 'hidden_size'"):
        config_of(MIX, hiden_size=12)
    with pytest.raises(SpecError, match="did you mean 'rms_norm_eps'"):
        PaperLlamaConfig.from_dict(config_of(MIX).to_dict() | {"rms_norm_ep": 1e-5})


def test_keys_of_every_configuration_are_accepted_and_kept(tmp_path):
    config = config_of(MIX, attn_implementation="eager", output_hidden_states=True, dtype="float32")
    config.save_pretrained(tmp_path)
    loaded = PaperLlamaConfig.from_pretrained(tmp_path, output_attentions=True)
    assert loaded.output_attentions and loaded.output_hidden_states and loaded.dtype == torch.float32
    assert config_of(MIX, temperature=0.7).to_dict() == config_of(MIX).to_dict()


def test_labels_are_counted_by_their_names():
    assert config_of(MIX, id2label={0: "bad", 1: "fair", 2: "good"}).num_labels == 3
    with pytest.raises(SpecError, match="num_labels is 2, id2label has 3"):
        config_of(MIX, id2label={0: "bad", 1: "fair", 2: "good"}, num_labels=2)
