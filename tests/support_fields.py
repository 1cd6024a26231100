"""What each field of each kind of job is for, as tests see it: a value that it is changed to, and where that shows.

`EFFECTS` has an entry for every field. `Seen` names parts of an outcome (`Workshop.outcome` in test_job_fields.py):

    slug                            the job's readable name
    data, labels, metrics.<name>, series.<name>      of its record
    weights, weights at 0           of the model that it leaves: the last ones, and those before the first update
    trl.<name>, rows, start, every  what trl gets: an argument, its data set, first weights; updates between evaluations
    requests, answers               what lm-eval asks the model, and what it says
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support_small_jobs import A48, small


@dataclass(frozen=True)
class Seen:
    """Changed to `to`, each part of the outcome in `where` becomes another, and those in `stays` remain to the bit."""

    to: Any
    where: str
    "names of parts, separated by commas; `name=value`: becomes this value"
    stays: str = ""
    also: dict[str, Any] = field(default_factory=dict)
    "fields that have to change with it"
    given: dict[str, Any] = field(default_factory=dict)
    "fields that both jobs have, in place of those in BASE"


@dataclass(frozen=True)
class Elsewhere:
    """No effect that these tests can have."""

    why: str


ONE_VALUE = Elsewhere("has one value only")

T5 = {"tokenizer": "t5", "vocab_size": 32_000}
TASK_OF_IMAGES = {"dataset": "bundled:digits_of_12", "classes": 12}
OTHER_MODEL = small("pretrain", seed=8)
A8 = "a8_trunk"
TERNARY = small("pretrain", quantization=A8, sub_norm=True, hidden_act="relu2")
BITNET = {"quantization": A8, "sub_norm": True, "hidden_act": "relu2", "numerics": "pure_bf16"}
TASK = {"task": "arc_easy", "source": "bundled", "items": 3, "few_shot": 1, "max_length": 23}
OF_DESCENT = {"adam_betas": None, "adam_eps": None, "weight_decay": 0.0, "grad_clip": 0.0}
DESCENT = OF_DESCENT | {"optimizer": "sgd", "numerics": "pure_bf16", "loss_group": 6}
WIDE = {"hidden_size": 192, "intermediate_size": 208}
"Enough weights a matrix that they are coded."
TWO_PHASES = {"schedule": "two_phase", "second_peak_lr": 0.02}
FROM_ELSEWHERE = {"of": small("hub_model"), "text": "local:text_a", "text_tokens": 11}


def probe(series: str) -> dict[str, Seen]:
    """Fields of a kind that looks into a model on text, whose numbers are this series."""
    return {
        "of": Seen(OTHER_MODEL, series),
        "at": Seen("init", series, stays="data"),
        "text": Seen("local:text_b", f"{series},data", given=FROM_ELSEWHERE),
        "text_tokens": Seen(12, series, stays="data", given=FROM_ELSEWHERE),
    }


def of_inputs(series: str) -> dict[str, Seen | Elsewhere]:
    """The same of a kind that looks at what enters the projections."""
    no_decoder = Elsewhere("a model from elsewhere that is no decoder of this project is refused")
    other = small("pretrain", seed=8, **A48)
    return probe(series) | {"of": Seen(other, series), "text": no_decoder, "text_tokens": no_decoder}


TRIED = {"quantizers": {"four": "int4_absmean"}}
TRL = {
    "train_split": Seen("more", "rows"),
    "batch": Seen(6, "trl.max_steps"),
    "epochs": Seen(3.0, "trl.max_steps", stays="start"),
    "peak_lr": Seen(0.01, "trl.learning_rate=0.01"),
    "warmup": Seen(0.5, "trl.warmup_steps"),
    "schedule": (
        Seen("linear", "trl.lr_scheduler_type=linear"),
        Seen("constant", "trl.lr_scheduler_type=constant_with_warmup"),
    ),
    "numerics": (
        Seen("fp32_master", "trl.bf16=True", stays="start"),
        Seen("pure_bf16", "start", stays="trl.bf16"),
    ),
    "seed": Seen(9, "trl.seed=9"),
    "max_updates": Seen(2, "trl.max_steps=2"),
    "adam_betas": Seen((0.6, 0.97), "trl.adam_beta1=0.6,trl.adam_beta2=0.97"),
    "adam_eps": Seen(1e-4, "trl.adam_epsilon=0.0001"),
    "weight_decay": Seen(0.02, "trl.weight_decay=0.02"),
    "grad_clip": Seen(0.4, "trl.max_grad_norm=0.4"),
}
"Fields of paperlm.finetune.settings.Training that mean the same in each kind."

STORED = {
    "store": Seen(
        "plain", "metrics.weight_bytes", given={"mant_bits": 7, "block_norm": None}, stays="metrics.losses_hash"
    ),
    "mant_bits": Seen(3, "metrics.losses_hash,metrics.bits_per_weight", stays="metrics.tokens"),
    "block_norm": Seen(32, "metrics.losses_hash,metrics.bits_per_weight", stays="metrics.tokens"),
    "norm_semantics": Seen("authors_v1", "metrics.losses_hash", stays="metrics.tokens"),
    "policy": Seen("all", "metrics.stored_weights,metrics.losses_hash", stays="metrics.tokens"),
}
"Of two kinds that store a model's weights and measure its losses."

EFFECTS: dict[str, dict[str, Seen | tuple[Seen, ...] | Elsewhere]] = {
    "pretrain": {
        "size": Seen("250M", "slug", stays="weights"),
        "hidden_size": Seen(24, "metrics.parameters"),
        "intermediate_size": Seen(48, "metrics.parameters"),
        "n_heads": Seen(2, "weights", stays="weights at 0,metrics.parameters"),
        "n_layers": Seen(3, "metrics.parameters"),
        "vocab_size": Seen(32_000, "metrics.parameters", also=T5),
        "tokenizer": Seen("t5", "data,metrics.unigram_perplexity", also=T5),
        "norm": Seen({"name": "post_ln"}, "weights", stays="metrics.parameters"),
        "rms_norm_eps": Seen(0.1, "weights", stays="weights at 0"),
        "rope_theta": Seen(20.0, "weights", stays="weights at 0"),
        "initializer_range": Seen(0.02, "weights at 0"),
        "embed_init_std": Seen(0.02, "weights at 0"),
        "zero_last_embedding_row": Seen(True, "weights at 0"),
        "dataset": Seen("local:text_b", "data,weights,metrics.unigram_perplexity", stays="weights at 0"),
        "seq_len": Seen(32, "data,metrics.tokens_slots", stays="weights at 0"),
        "example": Seen("split", "data,metrics.tokens_nonpad"),
        "train_examples": Seen(40, "data,metrics.epochs", stays="weights at 0"),
        "validation_tokens": Seen(200, "data,metrics.validation_tokens", stays="weights"),
        "optimizer": (
            Seen("adamw", "weights", stays="weights at 0"),
            Seen("sgd", "weights", stays="weights at 0", also=OF_DESCENT),
            Seen("lomo", "slug,metrics.state_bytes", stays="weights", given=DESCENT),
        ),
        "weights": (
            Seen("raw", "slug,metrics.bits_per_weight", stays="weights at 0", given=DESCENT),
            Seen("packed", "slug,metrics.bits_per_weight", stays="weights", given=DESCENT | WIDE | {"weights": "raw"}),
        ),
        "adam_betas": (
            Seen((0.9, 0.95), "weights", stays="weights at 0"),
            Seen((0.8, 0.99), "weights", stays="weights at 0"),
        ),
        "adam_eps": Seen(1e-3, "weights", stays="weights at 0"),
        "weight_decay": Seen(0.2, "weights", stays="weights at 0"),
        "grad_clip": Seen(0.0, "weights", stays="weights at 0"),
        "peak_lr": Seen(0.02, "weights", stays="weights at 0"),
        "warmup_fraction": Seen(0.2, "weights", stays="weights at 0"),
        "final_lr_fraction": Seen(0.5, "weights", stays="weights at 0"),
        "steps": Seen(6, "metrics.updates=6,weights"),
        "global_batch": Seen(9, "metrics.tokens_slots=1080,weights", stays="weights at 0"),
        "loss_group": Seen(2, "weights,metrics.loss_batches", stays="weights at 0"),
        "numerics": (
            Seen("fp32_master", "weights", stays="weights at 0"),
            Seen("pure_bf16", "weights at 0"),
        ),
        "seed": Seen(8, "weights at 0,metrics.tokens_nonpad", stays="data"),
        "eval_every": Seen(2, "series.eval", stays="weights,series.train"),
        "loss": Seen("cce", "weights", stays="weights at 0"),
        "curve": Seen("every_update", "metrics.ppl_sequences,series.eval", stays="weights"),
        "schedule": (
            Seen("linear", "weights", stays="weights at 0"),
            Seen("two_phase", "weights", stays="weights at 0", also={"second_peak_lr": 0.02}),
        ),
        "warmup_at_least": Seen(3, "weights", stays="weights at 0"),
        "end_lr": Seen(0.002, "weights", given={"schedule": "linear"}, also={"final_lr_fraction": None}),
        "phase_at": Seen(0.8, "weights", stays="weights at 0", given=TWO_PHASES),
        "second_peak_lr": Seen(0.01, "weights", stays="weights at 0", given=TWO_PHASES),
        "second_weight_decay": Seen(0.5, "weights", stays="weights at 0", given=TWO_PHASES),
        "decay_norms": Seen(False, "weights", stays="weights at 0"),
        "quantization": (
            Seen("a48_int4", "weights,slug", stays="weights at 0"),
            Seen({"weight": "ternary_absmean"}, "weights", stays="weights at 0"),
            Seen({"qkv": "int8_absmax"}, "weights", stays="weights at 0"),
        ),
        "sub_norm": Seen(True, "metrics.parameters"),
        "fused_norms": Seen(True, "weights", stays="weights at 0", given=BITNET),
        "hidden_act": Seen("relu2", "weights", stays="weights at 0"),
        "tie_word_embeddings": Seen(True, "metrics.parameters"),
    },
    "sft": TRL | {
        "of": Seen(OTHER_MODEL, "start", stays="rows"),
        "dataset": Seen("local:instructions_b", "rows,data"),
        "validation_split": Seen("more", "metrics.eval_loss", stays="rows"),
        "examples": Seen(13, "rows,metrics.examples=13", stays="metrics.eval_loss"),
        "validation_examples": Seen(6, "metrics.eval_loss,metrics.eval_examples=6", stays="rows"),
        "template": Seen("chosen", "rows", given={"dataset": "local:both"}),
        "block": Seen(60, "trl.max_length=60,rows"),
        "loss_on": Seen("answer", "rows,metrics.eval_loss"),
        "cut": Seen("start", "rows", given={"block": 60}),
        "packing": Seen(True, "trl.packing=True,trl.max_steps", given={"block": 300}),
        "loss": ONE_VALUE,
        "eval_every": Seen(2, "every=2"),
    },
    "reward_model": TRL | {
        "of": Seen(OTHER_MODEL, "start", stays="rows"),
        "dataset": Seen("local:pairs_b", "rows,data"),
        "validation_split": Seen("more", "metrics.margin", stays="rows"),
        "examples": Seen(11, "rows", stays="metrics.margin"),
        "validation_examples": Seen(6, "metrics.margin,metrics.validation_pairs", stays="rows"),
        "prompt_length": Seen(18, "rows,metrics.pairs_left_out"),
        "answer_length": Seen(4, "rows,metrics.cut_share"),
        "seed": Seen(9, "trl.seed=9,start", stays="rows"),
    },
    "rloo": TRL | {
        "of": Seen(small("sft", of=OTHER_MODEL), "start,metrics.reward_before", stays="rows"),
        "reward": Seen(small("reward_model", seed=4), "metrics.reward_after", stays="metrics.kl,rows"),
        "baseline": Seen(small("sft", of=OTHER_MODEL), "metrics.reward_after,labels", stays="metrics.length_after"),
        "judge": Seen(small("reward_model", seed=4), "metrics.judge_after", stays="metrics.reward_after"),
        "dataset": Seen("local:pairs_b", "rows,data"),
        "validation_split": Seen("more", "metrics.reward_after", stays="rows"),
        "prompts": Seen(12, "rows,metrics.prompts=12", stays="metrics.reward_after"),
        "validation_prompts": Seen(6, "metrics.reward_after,metrics.validation_prompts=6", stays="rows"),
        "prompt_length": Seen(18, "rows,metrics.reward_after"),
        "answer_length": Seen(6, "trl.max_completion_length=6,metrics.length_after"),
        "samples": Seen(4, "trl.num_generations=4,metrics.reward_after", stays="rows"),
        "beta": Seen(0.05, "trl.beta=0.05"),
        "temperature": Seen(0.5, "trl.temperature=0.5,metrics.reward_after"),
        "batch": Seen(5, "trl.per_device_train_batch_size=15,rows"),
        "seed": Seen(9, "trl.seed=9,rows,metrics.reward_after"),
    },
    "lm_eval": {
        "of": Seen(OTHER_MODEL, "answers", stays="requests"),
        "at": Seen("init", "answers", stays="requests"),
        "tasks": Seen(["arc_easy", "piqa"], "metrics.piqa/acc,data", stays="metrics.arc_easy/acc"),
        "source": Elsewhere("local and hub take the full sets; tests/test_harness.py has what they ask for"),
        "items": Seen(5, "metrics.arc_easy/items=5,requests"),
        "few_shot": (Seen(2, "requests", stays="data"), Seen(0, "requests,data")),
        "few_shot_seed": Seen(4321, "requests", stays="data"),
        "max_length": Seen(200, "metrics.arc_easy/cut,answers"),
        "kv_cache": Seen({"kv_bits": 3}, "answers,slug", stays="requests"),
    },
    "image_classification": {
        name: Seen(value, "weights", stays="weights at 0")
        for name, value in {
            "n_heads": 2, "layer_norm_eps": 0.1, "pixel_mean": [0.5], "pixel_std": [0.6], "crop_area": [0.6, 1.0],
            "crop_ratio": [0.75, 1.1], "flip": 0.0, "rand_augment": None, "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0,
            "mix_group": 4, "label_smoothing": 0.2, "stochastic_depth": 0.5, "adam_betas": [0.9, 0.95],
            "adam_eps": 1e-3, "weight_decay": 0.3, "grad_clip": 0.0, "peak_lr": 0.02, "warmup_fraction": 0.2,
            "final_lr_fraction": 0.6, "numerics": "fp32_master",
        }.items()
    } | {
        "size": Seen("ViT-Tiny", "slug", stays="weights"),
        "hidden_size": Seen(24, "metrics.parameters"),
        "intermediate_size": Seen(48, "metrics.parameters"),
        "n_layers": Seen(4, "metrics.parameters"),
        "patch_size": Seen(4, "weights at 0"),
        "norm": Seen({"name": "post_ln"}, "weights", stays="metrics.parameters"),
        "initializer_range": Seen(0.02, "weights at 0"),
        "dataset": Seen("bundled:digits_of_12", "data,metrics.parameters", also=TASK_OF_IMAGES),
        "classes": Seen(12, "metrics.parameters", also=TASK_OF_IMAGES),
        "train_images": Seen(25, "metrics.epochs,weights", stays="weights at 0"),
        "validation_images": Seen(16, "metrics.validation_images=16,metrics.loss_validation", stays="weights"),
        "image_size": Seen(16, "metrics.parameters"),
        "eval_crop": Seen(0.5, "metrics.loss_validation", stays="weights"),
        "optimizer": ONE_VALUE,
        "steps": Seen(6, "metrics.updates=6,weights"),
        "global_batch": Seen(24, "metrics.images=120,weights", stays="weights at 0"),
        "seed": Seen(8, "weights at 0", stays="data"),
        "eval_every": Seen(2, "series.eval", stays="weights,series.train"),
    },
    "hub_model": {"name": Seen("local:model_b", "weights,data")},
    "angular_distance": probe("series.angular") | {"documents": Seen(4, "series.angular,metrics.documents=4")},
    "output_variance": probe("series.variance") | {"documents": Seen(4, "series.variance,metrics.documents=4")},
    "gradient_norms": probe("series.gradient_norms") | {
        "batches": Seen(1, "series.gradient_norms,metrics.tokens"),
        "batch": Seen(2, "series.gradient_norms,metrics.tokens"),
    },
    "block_removal": probe("series.removal") | {
        "documents": Seen(4, "metrics.full/perplexity", stays="data"),
        "task": Seen("piqa", "requests,data", stays="metrics.full/perplexity", given=TASK),
        "source": Elsewhere("as for lm_eval"),
        "items": Seen(5, "requests", stays="data", given=TASK),
        "few_shot": (
            Seen(2, "requests", stays="data", given=TASK),
            Seen(0, "requests,data", stays="metrics.full/perplexity", given=TASK),
        ),
        "max_length": Seen(200, "labels,answers", stays="data", given=TASK),
    },
    "span_answers": {
        "of": Seen(small("hub_model", name="local:answers_b"), "metrics.f1,slug", stays="data,metrics.windows"),
        "source": Elsewhere("as for lm_eval"),
        "items": Seen(29, "metrics.items=29,labels", stays="data"),
        "max_length": Seen(200, "metrics.windows", stays="data"),
        "stride": Seen(80, "metrics.windows", stays="data"),
        "n_best": Seen(2, "metrics.f1,labels", stays="metrics.windows"),
        "longest": Seen(2, "metrics.f1", stays="metrics.windows"),
    },
    "continue_pretrain": {
        "of": Seen(OTHER_MODEL, "weights,metrics.tokens_nonpad", stays="data"),
        "at": Seen(2, "weights,series.train,slug", stays="metrics.updates"),
        "quantization": Seen("full_int4", "weights,slug", stays="data", given={"of": TERNARY, "quantization": A8}),
    },
    "text_perplexity": {
        "of": Seen(OTHER_MODEL, "metrics.loss", stays="metrics.tokens,data"),
        "at": Seen("init", "metrics.loss", stays="metrics.tokens"),
        "text": Seen("local:text_b", "data,metrics.loss"),
        "documents": Seen(29, "data,metrics.documents=29"),
        "chunk": Seen(50, "metrics.chunks,metrics.documents_longer", stays="data"),
        "longer": Seen("split", "metrics.tokens,labels", stays="data"),
        "kv_cache": Seen({"kv_bits": 3}, "metrics.loss,slug", stays="metrics.tokens"),
    },
    "stored_perplexity": {
        "of": Seen(small("pretrain", seed=8, **WIDE), "metrics.losses_hash", stays="metrics.tokens,data"),
        "at": Seen("init", "metrics.losses_hash", stays="metrics.tokens"),
        **STORED,
        "text": Seen("local:text_b", "data,metrics.losses_hash"),
        "documents": Seen(29, "data,metrics.words"),
        "window": Seen(25, "metrics.windows", stays="data"),
    },
    "stored_answers": {
        "of": Seen(small("text_to_sql", seed=6, **WIDE), "metrics.losses_hash", stays="metrics.tokens,data"),
        "at": Elsewhere("its model has no other state: tests/test_stored_answers.py"),
        **STORED,
        "batch": Seen(2, "series.batches,metrics.perplexity", stays="metrics.tokens"),
        "questions": Elsewhere("tests/test_published_t5.py: of a model from elsewhere alone"),
        "timed": Elsewhere("tests/test_stored_answers.py: it is blocked without a GPU"),
    },
    "stored_lm_eval": {
        "of": Seen(small("pretrain", seed=8, **WIDE), "answers,metrics.likelihoods_hash", stays="requests"),
        "at": Seen("init", "answers,metrics.likelihoods_hash", stays="requests"),
        "store": Seen("plain", "metrics.weight_bytes", given={"mant_bits": 7, "block_norm": None},
                      stays="metrics.likelihoods_hash,answers"),
        "mant_bits": Seen(3, "answers,metrics.bits_per_weight", stays="requests"),
        "block_norm": Seen(32, "answers,metrics.bits_per_weight", stays="requests"),
        "norm_semantics": Seen("authors_v1", "answers,metrics.likelihoods_hash", stays="requests"),
        "policy": Seen("all", "answers,metrics.stored_weights", stays="requests"),
        "tasks": Seen(["arc_easy", "piqa"], "metrics.piqa/acc,data", stays="metrics.arc_easy/acc"),
        "source": Elsewhere("as for lm_eval"),
        "items": Seen(5, "metrics.arc_easy/items=5,requests"),
        "few_shot": (Seen(2, "requests", stays="data"), Seen(0, "requests,data")),
        "few_shot_seed": Seen(4321, "requests", stays="data"),
        "max_length": Seen(200, "metrics.arc_easy/cut,answers"),
    },
    "stored_speed": {
        name: Elsewhere("speed is measured on a GPU; tests/test_stored_jobs.py has what is timed")
        for name in (
            "of", "at", "store", "mant_bits", "block_norm", "norm_semantics", "policy", "what", "batch", "window",
            "repeats",
        )
    },
    "stored_bytes": {
        name: Seen(value, "metrics.parameters")
        for name, value in {
            "intermediate_size": 256, "n_heads": 12, "n_kv_heads": 2, "head_size": 36, "n_layers": 3,
            "vocab_size": 1030, "tied": True,
        }.items()
    } | {
        "hidden_size": Seen(384, "metrics.parameters,slug"),
        "architecture": Seen("t5", "metrics.parameters,slug", given={"n_kv_heads": None, "in_float32": []}),
        "store": Seen("plain", "metrics.weight_bytes,slug", given={"mant_bits": 7, "block_norm": None},
                      stays="metrics.parameters"),
        "mant_bits": Seen(3, "metrics.bits_per_weight,slug", stays="metrics.stored_weights"),
        "block_norm": Seen(32, "metrics.bits_per_weight,slug", stays="metrics.stored_weights"),
        "norm_semantics": Seen("authors_v1", "metrics.weight_bytes,slug", stays="metrics.stored_weights"),
        "policy": Seen("all_linear", "metrics.stored_weights", stays="metrics.parameters"),
        "in_float32": Seen([], "metrics.weight_bytes,metrics.stored_weights,slug", stays="metrics.parameters"),
        "std": Seen(3.0, "metrics.weight_bytes", stays="metrics.stored_weights"),
    },
    "weight_entropy": {
        "of": Seen(OTHER_MODEL, "metrics.joint,series.histogram", stays="metrics.weights"),
        "at": Seen("init", "metrics.joint,series.histogram", stays="metrics.weights"),
        "policy": Seen("all", "metrics.weights,series.histogram"),
    },
    "perturbed_perplexity": {
        "of": Seen(OTHER_MODEL, "metrics.loss,series.grid", stays="metrics.bytes,data"),
        "at": Seen("init", "metrics.loss,series.grid", stays="metrics.bytes"),
        "text": Seen("local:text_b", "data,metrics.loss"),
        "documents": Seen(29, "data,metrics.bytes"),
        "window": Seen(25, "metrics.windows", stays="data"),
        "absolute": Seen([-4, None], "series.grid", stays="metrics.loss"),
        "relative": Seen([0, None], "series.grid", stays="metrics.loss"),
        "policy": Seen("all", "series.grid", stays="metrics.loss"),
        "noise_seed": Seen(9, "series.grid", stays="metrics.loss"),
    },
    "normal_entropy": {"std": Seen(0.04, "metrics.exponent,series.histogram", stays="metrics.sign")},
    "text_to_sql": {
        name: Seen(value, "metrics.parameters")
        for name, value in {
            "hidden_size": 32, "intermediate_size": 48, "n_heads": 3, "head_size": 6, "n_layers": 1,
        }.items()
    } | {
        "tokenizer": Seen("t5", "metrics.parameters", also=T5),
        "vocab_size": Seen(1030, "metrics.parameters"),
        "dataset": ONE_VALUE,
        "examples": Seen(20, "data,series.train"),
        "validation_examples": Seen(6, "data,metrics.loss", stays="series.train"),
        "source_length": Seen(40, "series.train", stays="data"),
        "target_length": Seen(9, "series.train", stays="data"),
        "optimizer": Seen("sgd", "slug,metrics.state_bytes", stays="metrics.weights_hash"),
        "weights": Seen("packed", "slug", stays="metrics.weights_hash"),
        "of": Elsewhere("tests/test_published_t5.py: a published T5 in the place of the shape"),
        "adapter": Elsewhere("tests/test_text_to_sql.py and tests/test_published_t5.py: it is blocked"),
        "peak_lr": Seen(0.05, "series.train", stays="data"),
        "steps": Seen(5, "metrics.examples=15", stays="data"),
        "batch": Seen(2, "metrics.examples=8", stays="data"),
        "seed": Seen(6, "series.train,slug", stays="data"),
        "timed": Elsewhere("tests/test_text_to_sql.py: it is blocked without a GPU"),
    },
    "activation_sparsity": of_inputs("series.zeros") | {
        "documents": Seen(4, "series.zeros,metrics.documents=4", stays="data"),
    },
    "activation_distribution": of_inputs("series.histogram") | {
        "documents": Seen(4, "series.histogram,metrics.documents=4", stays="data"),
        "bins": Seen(9, "series.histogram", stays="metrics.o/kurtosis"),
        "within": Seen(0.9, "series.histogram", stays="metrics.o/kurtosis"),
        "quantizers": Seen({"four": "int4_absmax"}, "metrics.four/zeros", stays="metrics.o/rms", given=TRIED),
        "tried_on": Seen("down", "metrics.four/zeros", stays="metrics.down/rms", given=TRIED),
    },
    "rank_probability": {
        "of": Seen(OTHER_MODEL, "series.ranks"),
        "at": Seen("init", "series.ranks", stays="metrics.tokens"),
        "tokens": Seen(60, "series.ranks,metrics.tokens=60"),
    },
}  # fmt: skip
