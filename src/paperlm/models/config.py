"""The configuration of the decoder: every key is implemented, or refused by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from paperlm.errors import SpecError, unknown
from paperlm.models.packed import check_layout
from paperlm.norms import ModelShape, NormMethod, build_method
from paperlm.quantizers.scheme import Quantization, kv_cache_of, quantization_of

BASE_KEYS = frozenset(
    {
        "name_or_path",
        "output_attentions",
        "attn_implementation",
        "experts_implementation",
        "torch_dtype",
        "gradient_checkpointing",
        "quantization_config",
        "tie_last_hidden_states",
        "model_type",
    }
    | GenerationConfig._get_default_generation_params().keys()
)
"Keys of any transformers configuration that are no fields of its class; those of generation it takes out itself."

MODULE = "paperlm_model"
"Module that every saved folder holds, so that tools which trust a folder's code find the classes in this package."

MODULE_TEXT = '''"""The decoder of this folder: classes of the package paperlm, for tools that trust a folder's code."""

try:
    from paperlm.models.llama import (  # noqa: F401
        PaperLlamaConfig,
        PaperLlamaForCausalLM,
        PaperLlamaForSequenceClassification,
        PaperLlamaModel,
    )
except ImportError as error:
    raise ImportError(
        f"this folder holds a decoder of the package paperlm, which cannot be imported ({error}): install it with pip "
        "from a checkout of the repository that made the folder"
    ) from error
'''

PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"Modules that are called as in transformers' LLaMA."


class PaperLlamaConfig(PreTrainedConfig):
    """Shape and method of a decoder; field names are those of transformers' LlamaConfig where it has them.

    Raises SpecError for an unknown key, and for one of LlamaConfig's with a value that the decoder does not have.
    """

    model_type = "paperlm_llama"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    embed_init_std: float = 0.02
    zero_last_embedding_row: bool = False
    "True: row vocab_size-1 is zero and gets no gradient, the side effect of pad_token_id = -1 in the authors' configs"
    norm: dict[str, Any] | None = None
    "`{name: ..., option: value}`, see paperlm.norms; None means pre_ln"
    layer_numbers: list[int] | None = None
    "training-time number of each block still present; None means 1..num_hidden_layers"
    trained_layers: int | None = None
    "depth at training time; None means num_hidden_layers"
    use_cache: bool = True
    hidden_act: str = "silu"
    "silu (or swish): LLaMA's; relu2: max(x, 0)^2"
    sub_norm: bool = False
    "True: an RMSNorm in front of the output and down projections (SubLN)"
    quantization: dict[str, Any] | str | None = None
    """`{weight: ..., qkv: ..., o: ..., gate_up: ..., down: ...}`, see paperlm.quantizers.scheme, or the name of one in
    paperlm.quantizers.presets; None: no quantizers"""
    kv_cache: dict[str, Any] | None = None
    """`{q_bits: 16|4, kv_bits: 4|3, first_bits: 8|4|3, mapping: symmetric|minmax}`: attention's operands in few bits;
    None: as they are"""
    packed_weights: dict[str, Any] | None = None
    "layout of weights in two bits each (paperlm.models.packed); None: latent ones"
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    num_labels: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)
        rope = kwargs.pop("rope_parameters", None)
        if rope is not None:
            if set(rope) - {"rope_theta", "rope_type"} or rope.get("rope_type", "default") != "default":
                raise SpecError(f"rope_parameters: {rope!r}: only rope_type default with a rope_theta is implemented")
            self.rope_theta = rope.get("rope_theta", self.rope_theta)
        for key, implemented in {**self._fixed(), "per_layer_config": (None,)}.items():
            if key in kwargs:
                _only(key, kwargs.pop(key), implemented)
        for key in ("zero_last_embedding_row", "use_cache", "sub_norm", "tie_word_embeddings"):
            if not isinstance(getattr(self, key), bool):
                raise SpecError(f"{key}: {getattr(self, key)!r}: true or false, without quotes")
        fields = set(type(self).__dataclass_fields__)
        for key in kwargs:
            if key not in BASE_KEYS and not key.startswith("_"):
                raise SpecError(unknown("key of the model's configuration", key, fields | BASE_KEYS))
        if self.id2label is not None and self.num_labels != len(self.id2label):
            if self.num_labels != 1:
                raise SpecError(f"num_labels is {self.num_labels}, id2label has {len(self.id2label)}: give one of them")
            self.num_labels = len(self.id2label)
        kwargs["auto_map"] = {
            "AutoConfig": f"{MODULE}.PaperLlamaConfig",
            "AutoModel": f"{MODULE}.PaperLlamaModel",
            "AutoModelForCausalLM": f"{MODULE}.PaperLlamaForCausalLM",
            "AutoModelForSequenceClassification": f"{MODULE}.PaperLlamaForSequenceClassification",
        }
        super().__post_init__(**kwargs)

    def _fixed(self) -> dict[str, tuple[Any, ...]]:
        """Keys of transformers' LLaMA that are no fields -> values that mean what the decoder computes."""
        return {
            "num_key_value_heads": (None, self.num_attention_heads),
            "head_dim": (None, self.hidden_size // self.num_attention_heads),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "attention_dropout": (0,),
            "rope_scaling": (None,),
            "partial_rotary_factor": (None, 1),
            "sliding_window": (None,),
            "layer_types": (None, ["full_attention"] * self.num_hidden_layers),
            "pretraining_tp": (None, 1),
            "is_causal": (True,),
        }

    def check(self) -> None:
        """Raise SpecError if no decoder can be built: shape, method, or a key that was set to something else."""
        for key, implemented in {
            **self._fixed(),
            "hidden_act": ("silu", "swish", "relu2"),
            "is_encoder_decoder": (False,),
            "chunk_size_feed_forward": (0,),
        }.items():
            if hasattr(self, key):
                _only(key, getattr(self, key), implemented)
        if self.hidden_size % self.num_attention_heads or (self.hidden_size // self.num_attention_heads) % 2:
            raise SpecError(
                f"hidden_size {self.hidden_size} does not split into {self.num_attention_heads} heads of even width"
            )
        if len(self.numbers()) != self.num_hidden_layers:
            raise SpecError(
                f"layer_numbers names {len(self.numbers())} blocks, num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.tie_word_embeddings and self.zero_last_embedding_row:
            raise SpecError(
                "tie_word_embeddings: zero_last_embedding_row holds a row at zero that the head would train"
            )
        self.method()
        quantization = self.quantizers()
        if quantization is not None:
            quantization.check(self.hidden_size, self.intermediate_size)
        if self.kv_cache is not None:
            kv_cache_of(self.kv_cache)
        if self.packed_weights is not None:
            check_layout(self.packed_weights, quantization)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers."""
        # peft has a table by model type of what an adapter takes if no modules are named, and no hook to enter it. It
        # asks for this dictionary right before it looks there, so that peft is never imported here.
        peft = sys.modules.get("peft.utils.constants")
        for name, known in vars(peft).items() if peft is not None else ():
            if name.endswith("_MODULES_MAPPING") and PROJECTIONS.issuperset(known.get("llama") or {""}):
                known.setdefault(self.model_type, known["llama"])
        return super().to_dict()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the module that `auto_map` names beside config.json."""
        super().save_pretrained(save_directory, *args, **kwargs)
        Path(save_directory, f"{MODULE}.py").write_text(MODULE_TEXT, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would copy this package's source into the folders that it saves."""

    def numbers(self) -> list[int]:
        """Training-time number of each block, from 1."""
        return self.layer_numbers or list(range(1, self.num_hidden_layers + 1))

    def shape(self) -> ModelShape:
        """What the normalization method may look at."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            n_layers=self.trained_layers or self.num_hidden_layers,
            initializer_range=self.initializer_range,
            embed_init_std=self.embed_init_std,
        )

    def quantizers(self) -> Quantization | None:
        """What is quantized; raises SpecError if a quantizer does not exist or lacks an option."""
        return None if self.quantization is None else quantization_of(self.quantization)

    def method(self) -> NormMethod:
        """The normalization method; raises SpecError if it does not exist or does not fit the shape."""
        method = build_method(self.norm or {"name": "pre_ln"})
        method.check(self.shape())
        return method


def _only(key: str, value: Any, implemented: tuple[Any, ...]) -> None:
    if value not in implemented:
        raise SpecError(f"{key}: {value!r} is not implemented by this decoder; only {implemented[-1]!r} is")
