"""A small job of every kind, whose data are those of support_toy_registry.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paperlm.jobs import Job, job_kinds


def job(kind: str, **changes: Any) -> Job:
    """A small job of a kind. A function in place of a value is called: jobs need the registry of the tests."""
    settings = BASE[kind] | changes
    return job_kinds()[kind].model_validate({k: v() if callable(v) else v for k, v in settings.items()})


def small(kind: str, **changes: Any) -> Callable[[], Job]:
    """As `job`, made when it is called."""
    return lambda: job(kind, **changes)


A48 = {"quantization": "a48_int4", "sub_norm": True, "hidden_act": "relu2"}

# No two numbers of a job are equal, so that one in the place of another shows.
TRAINING = {
    "batch": 4, "epochs": 1.5, "peak_lr": 0.02, "warmup": 0.3, "schedule": "cosine", "numerics": "fp32", "seed": 5,
    "adam_betas": (0.7, 0.96), "adam_eps": 1e-5, "weight_decay": 0.03, "grad_clip": 0.6,
}  # fmt: skip
BASE: dict[str, dict[str, Any]] = {
    "pretrain": {
        "size": "71M", "hidden_size": 16, "intermediate_size": 40, "n_heads": 4, "n_layers": 2, "vocab_size": 1024,
        "norm": {"name": "pre_ln"}, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "initializer_range": 0.07,
        "embed_init_std": 0.3, "zero_last_embedding_row": False, "dataset": "local:text_a", "tokenizer": "bpe1024",
        "seq_len": 24, "example": "truncate", "train_examples": 50, "validation_tokens": 300, "optimizer": "adam",
        "adam_betas": (0.8, 0.95), "adam_eps": 1e-6, "weight_decay": 0.05, "grad_clip": 0.5, "peak_lr": 0.03,
        "warmup_fraction": 0.4, "final_lr_fraction": 0.25, "steps": 5, "global_batch": 6, "loss_group": 3,
        "numerics": "fp32", "seed": 7, "eval_every": 3,
    },
    "sft": TRAINING | {
        "of": small("pretrain"), "dataset": "local:instructions_a", "examples": 18, "validation_examples": 5,
        "template": "llm_adapters", "block": 96, "loss_on": "sequence",
    },
    "reward_model": TRAINING | {
        "of": small("pretrain"), "dataset": "local:pairs_a", "examples": 14, "validation_examples": 8,
        "prompt_length": 20, "answer_length": 9,
    },
    "rloo": TRAINING | {
        "of": small("sft"), "reward": small("reward_model"), "baseline": small("sft", seed=6),
        "dataset": "local:pairs_a", "prompts": 10, "validation_prompts": 7, "prompt_length": 20, "answer_length": 5,
        "samples": 3, "beta": 0.04, "temperature": 0.9,
    },
    "lm_eval": {
        "of": small("pretrain"), "tasks": ["arc_easy"], "source": "bundled", "items": 3, "few_shot": 1,
        "max_length": 23,
    },
    "hub_model": {"name": "local:model_a"},
    "span_answers": {
        "of": small("hub_model", name="local:answers_a"), "source": "bundled", "items": 30, "max_length": 150,
        "stride": 60, "n_best": 9, "longest": 25,
    },
    "image_classification": {
        "size": "ViT-Small", "hidden_size": 16, "intermediate_size": 40, "n_heads": 4, "n_layers": 3, "patch_size": 2,
        "norm": {"name": "pre_ln"}, "layer_norm_eps": 1e-5, "initializer_range": 0.07, "dataset": "bundled:digits",
        "classes": 10, "train_images": 30, "validation_images": 21, "image_size": 8, "pixel_mean": [0.3],
        "pixel_std": [0.36], "crop_area": [0.5, 1.0], "crop_ratio": [0.75, 1.3], "flip": 0.45,
        "rand_augment": [9.0, 0.55], "erasing": 0.25, "mixup": 0.8, "cutmix": 0.9, "mix_group": 6,
        "label_smoothing": 0.1, "stochastic_depth": 0.2, "eval_crop": 0.875, "optimizer": "adamw",
        "adam_betas": [0.81, 0.95], "adam_eps": 1e-6, "weight_decay": 0.06, "grad_clip": 0.5, "peak_lr": 0.03,
        "warmup_fraction": 0.4, "final_lr_fraction": 0.15, "steps": 5, "global_batch": 12, "numerics": "fp32",
        "seed": 7, "eval_every": 4,
    },
    "angular_distance": {"of": small("pretrain"), "documents": 5},
    "output_variance": {"of": small("pretrain"), "documents": 5},
    "gradient_norms": {"of": small("pretrain"), "batches": 2, "batch": 3},
    "block_removal": {"of": small("pretrain"), "documents": 5},
    "rank_probability": {"of": small("pretrain"), "tokens": 70},
    "activation_sparsity": {"of": small("pretrain", **A48), "documents": 5},
    "activation_distribution": {"of": small("pretrain", **A48), "documents": 5, "bins": 8},
    "continue_pretrain": {"of": small("pretrain"), "at": 3, "quantization": {"qkv": "int8_absmax"}},
    "text_perplexity": {
        "of": small("pretrain"), "text": "local:text_a", "documents": 30, "chunk": 60, "longer": "drop",
    },
    "stored_perplexity": {
        "of": small("pretrain", hidden_size=192, intermediate_size=208), "store": "packed", "mant_bits": 1,
        "block_norm": 512, "text": "local:text_a", "documents": 30, "window": 20,
    },
    "stored_answers": {
        "of": small("text_to_sql", hidden_size=192, intermediate_size=208), "store": "packed", "mant_bits": 1,
        "block_norm": 512, "batch": 3,
    },
    "stored_lm_eval": {
        "of": small("pretrain", hidden_size=192, intermediate_size=208), "store": "packed", "mant_bits": 1,
        "block_norm": 512, "tasks": ["arc_easy"], "source": "bundled", "items": 3, "few_shot": 1, "max_length": 23,
    },
    "stored_speed": {"of": small("pretrain"), "store": "packed", "batch": 2, "window": 20},
    "stored_bytes": {
        "store": "packed", "mant_bits": 1, "block_norm": 512, "architecture": "llama", "hidden_size": 192,
        "intermediate_size": 208, "n_heads": 6, "n_kv_heads": 3, "head_size": 32, "n_layers": 2, "vocab_size": 1024,
        "in_float32": ["down_proj"], "std": 0.02,
    },
    "drawn_speed": {
        "store": "packed", "architecture": "llama", "hidden_size": 192, "intermediate_size": 208, "n_heads": 6,
        "head_size": 32, "n_layers": 2, "vocab_size": 1024, "std": 0.02, "batch": 2, "window": 20,
    },
    "weight_entropy": {"of": small("pretrain")},
    "normal_entropy": {"std": 0.03},
    "perturbed_perplexity": {
        "of": small("pretrain"), "text": "local:text_a", "documents": 30, "window": 20, "absolute": [None, -3],
        "relative": [-1, None],
    },
    "text_to_sql": {
        "hidden_size": 24, "intermediate_size": 40, "n_heads": 2, "head_size": 8, "n_layers": 2,
        "tokenizer": "bpe1024", "vocab_size": 1024, "dataset": "bundled:spider_1000", "examples": 30,
        "validation_examples": 7, "source_length": 50, "target_length": 13, "optimizer": "lomo", "weights": "raw",
        "peak_lr": 0.1, "steps": 4, "batch": 3, "seed": 5,
    },
}  # fmt: skip
