"""Pre-training of one language model from random weights: `paperlm.train.language_model` on the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.data.registry import DatasetName, TokenizerName
from paperlm.data.settings import DataSettings, Example, TokenData
from paperlm.errors import SpecError
from paperlm.jobs.base import Beta, Inputs, Job, Machine, Norm, Quantizers, Seed, packed_bytes
from paperlm.models.sizes import VIT_SIZES, block_weights, bytes_in_training, flops_per_token, parameter_count
from paperlm.norms import ModelShape, NormMethod, build_method
from paperlm.quantizers.presets import preset_name
from paperlm.quantizers.scheme import quantization_of

if TYPE_CHECKING:
    from paperlm.result import Result

Loss = Literal[
    "cross_entropy", "cce", "cce_kahan", "cce_kahan_full_c", "cce_kahan_full_e", "cce_exact", "cce_exact_kept"
]
"""How the training loss is computed; the names after the first are the variants of Cut Cross-Entropy."""

MATERIALISED = "cross_entropy"

DESCENT = ("sgd", "lomo")
"Optimizers without moments."

OF_WEIGHTS = ("weight_bytes", "state_bytes", "bits_per_weight", "weights_hash")
"Metrics of a run with such an optimizer: of its weights, exact."
BY_WORD = ("validation_words", "loss_word")
"Metrics of such a run beside the loss of a token: words of the held-out text, and nats a word."
VECTORS = 32
"Of the model's width, at most so many a block beside its matrices: gains of norms and factors of residual branches."


class Pretrain(Job):
    """One pre-training run."""

    kind: ClassVar[str] = "pretrain"
    priority: ClassVar[int] = 2
    summary: ClassVar[str] = "train one language model from random weights"
    behaviour: ClassVar[int] = 1
    leaves_model: ClassVar[bool] = True
    distributed: ClassVar[bool] = True
    has_curve: ClassVar[bool] = True
    begins_at: ClassVar[int] = 0
    "updates before its first: those of another job"

    size: str
    "name of the model size in the paper; at small scales the shape below is not that size's"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=2, le=65536)
    norm: Norm
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    initializer_range: float = Field(gt=0)
    embed_init_std: float = Field(gt=0)
    zero_last_embedding_row: bool

    dataset: DatasetName
    tokenizer: TokenizerName
    seq_len: int = Field(gt=1)
    example: Example
    train_examples: int = Field(gt=0)
    "at most so many examples are prepared"
    validation_tokens: int = Field(gt=0)
    "the first documents that hold so many real tokens are the validation set"

    optimizer: Literal["adam", "adamw", "sgd", "lomo"]
    """adam: weight decay is part of the gradient; adamw: it is taken off the weights, times the rate; sgd: plain
    descent; lomo: the same, each weight updated within the backward pass as soon as its gradient is there"""
    adam_betas: tuple[Beta, Beta] | None
    "null for sgd and lomo, which have no moments"
    adam_eps: float | None = Field(gt=0)
    "null for sgd and lomo"
    weight_decay: float = Field(ge=0)
    grad_clip: float = Field(ge=0)
    "0 means none"
    peak_lr: float = Field(gt=0)
    warmup_fraction: float = Field(ge=0, lt=1)
    final_lr_fraction: float | None = Field(ge=0, le=1)
    "of peak_lr, what the rate falls to; null: end_lr says it"
    steps: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    "sequences per update"
    loss_group: int = Field(gt=0)
    "the loss is the mean over groups of so many sequences of the group's token mean (the authors' micro-batch)"
    numerics: Literal["pure_bf16", "fp32_master", "fp32"]
    seed: Seed
    eval_every: int = Field(gt=0)

    loss: Loss = MATERIALISED
    "cross_entropy: of materialised logits; the others are fused with the head (paperlm.models.losses)"
    curve: Literal["thinned", "every_update"] = "thinned"
    "training curve in the record: at most 160 averages; or every update"
    schedule: Literal["cosine", "linear", "two_phase"] = "cosine"
    "how the rate falls after the warm-up; two_phase: on two lines, with a jump from the first to the second"
    warmup_at_least: int = Field(0, ge=0)
    "updates of warm-up, where warmup_fraction would give fewer"
    end_lr: float | None = Field(None, ge=0)
    "of lines: what the rate falls to, in place of final_lr_fraction"
    phase_at: float = Field(0.5, gt=0, lt=1)
    "of two_phase: share of the updates after which the second phase begins"
    second_peak_lr: float | None = Field(None, gt=0)
    "of two_phase: where the second line would begin if it did at the end of the warm-up"
    second_weight_decay: float | None = Field(None, ge=0)
    "of two_phase: weight decay of the second phase; null: that of the first"
    decay_norms: bool = True
    "whether weight decay is on the gains and biases of norms as well; on all else it is"
    quantization: Quantizers = None
    "quantizers of weights and inputs (paperlm.quantizers.scheme), or the name of a preset that has them; None: none"
    sub_norm: bool = False
    "a norm in front of the output and down projections"
    fused_norms: bool = False
    """the norms of `sub_norm` and the quantizers behind them are one kernel, which rounds nothing in between: other
    last bits, and codes next to a tie, than the two apart"""
    hidden_act: Literal["silu", "relu2"] = "silu"
    "activation of the feed-forward; relu2: max(x, 0)^2"
    tie_word_embeddings: bool = False
    "embedding and head are one matrix"
    weights: Literal["plain", "raw", "packed"] = "plain"
    """how weights of projections lie between their uses (paperlm_kernels.stored): as PyTorch has them; in stores, raw
    or packed without loss, whose layers recompute activations and give the same bits as each other"""

    @field_validator("size")
    @classmethod
    def of_a_language_model(cls, value: str) -> str:
        if value in VIT_SIZES:
            raise ValueError(f"{value!r} is the size of an image classifier: use the kind image_classification")
        return value

    @model_validator(mode="after")
    def fits_together(self) -> Pretrain:
        if self.hidden_size % self.n_heads or (self.hidden_size // self.n_heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.n_heads} heads of even width")
        if self.global_batch % self.loss_group:
            raise ValueError(f"loss_group {self.loss_group} does not divide global_batch {self.global_batch}")
        self._check_schedule()
        self._check_optimizer()
        if self.tie_word_embeddings and self.zero_last_embedding_row:
            raise ValueError("tie_word_embeddings: the head would train the row that zero_last_embedding_row holds")
        self.token_data()  # a validation error of its own names the setting
        try:
            self.method().check(self.shape())
            if self.quantization is not None:
                quantization_of(self.quantization).check(self.hidden_size, self.intermediate_size)
        except SpecError as error:
            raise ValueError(str(error)) from None
        if self.fused_norms and not (self.sub_norm and self._quantized_behind_norms()):
            raise ValueError(
                "fused_norms: there is no norm with a quantizer behind it; set sub_norm, and quantization with o or "
                "down, or leave fused_norms out"
            )
        return self

    def _quantized_behind_norms(self) -> bool:
        """Whether what the output or the down projection reads is quantized."""
        return any((self.quantization or {}).get(place) for place in ("o", "down"))

    def _check_schedule(self) -> None:
        """ValueError for settings of another schedule, and for an end that is said twice or not at all."""
        two_phase = self.schedule == "two_phase"
        if two_phase != (self.second_peak_lr is not None):
            raise ValueError("schedule two_phase needs second_peak_lr, and no other one has it")
        if not two_phase and (self.second_weight_decay is not None or self.phase_at != 0.5):
            raise ValueError(
                f"schedule {self.schedule} has no second phase: leave phase_at and second_weight_decay out"
            )
        if two_phase and not 0 < self.phase_step < self.steps:
            raise ValueError(f"phase_at {self.phase_at} of {self.steps} steps leaves a phase empty: change one of them")
        if self.schedule == "cosine" and self.end_lr is not None:
            raise ValueError("schedule cosine falls to final_lr_fraction of the peak: leave end_lr out")
        if (self.end_lr is None) == (self.final_lr_fraction is None):
            raise ValueError(
                "what does the rate fall to? give end_lr and final_lr_fraction: null, or the fraction alone"
            )
        if self.warmup_at_least and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_at_least {self.warmup_at_least} takes all of the {self.steps} steps: lower it")

    def _check_optimizer(self) -> None:
        """ValueError for settings of another optimizer, and for stored weights that it cannot train."""
        descent = self.optimizer in DESCENT
        if descent and (self.weight_decay or self.grad_clip):
            raise ValueError(f"optimizer {self.optimizer} neither decays nor clips: weight_decay and grad_clip are 0")
        if descent != (self.adam_betas is None) or descent != (self.adam_eps is None):
            raise ValueError("adam_betas and adam_eps are settings of adam and adamw, and null for sgd and lomo")
        if self.optimizer == "lomo" and self.loss_group != self.global_batch:
            raise ValueError("optimizer lomo updates in one backward pass: loss_group is global_batch")
        if self.weights != "plain" and not descent:
            raise ValueError(f"weights {self.weights}: trained by sgd or lomo, not by {self.optimizer}")
        if self.weights != "plain" and self.quantization is not None:
            raise ValueError(f"weights {self.weights}: a model with quantizers has layers of its own; leave one out")
        if self.weights == "packed" and self.numerics != "pure_bf16":
            raise ValueError(f"weights packed are bfloat16: numerics is pure_bf16, not {self.numerics}")

    def method(self) -> NormMethod:
        """The normalization method."""
        return build_method(self.norm)

    def shape(self) -> ModelShape:
        """What the method may look at."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            n_layers=self.n_layers,
            initializer_range=self.initializer_range,
            embed_init_std=self.embed_init_std,
        )

    @property
    def warmup_steps(self) -> int:
        """Updates of linear warm-up."""
        return max(round(self.warmup_fraction * self.steps), self.warmup_at_least)

    @property
    def phase_step(self) -> int:
        """Updates before the second phase of schedule two_phase."""
        return round(self.phase_at * self.steps)

    @property
    def end_rate(self) -> float:
        """What the rate falls to."""
        return self.end_lr if self.end_lr is not None else self.final_lr_fraction * self.peak_lr

    def token_data(self) -> TokenData:
        """The prepared tokens that it trains on and is evaluated on."""
        return TokenData(**{key: getattr(self, key) for key in TokenData.model_fields})

    def data(self) -> list[DataSettings]:
        return [self.token_data()]

    def flops_of_a_token(self, ids: int) -> float:
        """To train the model on one of a text of so many ids, as `flops_per_token` counts them."""
        return flops_per_token(self.hidden_size, self.intermediate_size, self.n_layers, self.vocab_size, ids)

    def flops(self) -> float:
        """Of training, over all token slots."""
        return self.flops_of_a_token(self.seq_len) * self.steps * self.global_batch * self.seq_len

    def weight_count(self) -> int:
        return parameter_count(
            self.hidden_size,
            self.intermediate_size,
            self.n_layers,
            self.vocab_size,
            sub_norm=self.sub_norm,
            tied=self.tie_word_embeddings,
        )

    def card_bytes(self) -> int | None:
        """None with stores, whose bytes follow from the numbers in them."""
        if self.weights != "plain":
            return None
        moments = 0 if self.optimizer in DESCENT else 2
        return bytes_in_training(self.weight_count(), self.numerics, moments, gradients=self.optimizer != "lomo")

    def unshared(self, processes: int) -> str:
        if processes > 1 and self.optimizer == "lomo":
            return "optimizer lomo takes the sequences of an update in one pass of one process"
        if processes > 1 and self.weights != "plain":
            return f"weights {self.weights} lie in stores, whose gradients processes do not exchange"
        return super().unshared(processes)

    def metrics(self) -> tuple[str, ...]:
        return (
            "ppl_true", "loss_true", "loss_batches", "validation_tokens", "unigram_perplexity", "updates",
            "tokens_nonpad", "tokens_slots", "epochs", "parameters", *self._by_sequence(), *self._of_weights(),
        )  # fmt: skip

    def series(self) -> dict[str, tuple[str, ...]]:
        columns = ("update", "tokens")
        return {"train": (*columns, "loss"), "eval": (*columns, "ppl_true", *self._by_sequence())}

    def bounds(self) -> dict[str, tuple[float, float]]:
        slots = self.steps * self.global_batch * self.seq_len
        matrices = block_weights(self.hidden_size, self.intermediate_size, self.n_layers)
        matrices += (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        vectors = (self.n_layers + 1) * (VECTORS * self.hidden_size + self.intermediate_size)
        return {
            "updates": (self.steps, self.steps),
            "tokens_slots": (slots, slots),
            "parameters": (matrices, matrices + vectors),
        }

    def _by_sequence(self) -> tuple[str, ...]:
        return ("ppl_sequences",) if self.curve == "every_update" else ()

    def _of_weights(self) -> tuple[str, ...]:
        return (*OF_WEIGHTS, *BY_WORD) if self.optimizer in DESCENT else ()

    def slug(self) -> str:
        loss = "" if self.loss == MATERIALISED else f"-{self.loss}"
        model = model_slug(self.quantization, self.sub_norm, self.hidden_act)
        descent = f"-{self.optimizer}" if self.optimizer in DESCENT else ""
        stored = "" if self.weights == "plain" else f"-{self.weights}"
        return f"llama_{self.size}-{method_slug(self.norm)}{model}{loss}{descent}{stored}-s{self.seed}".lower()

    def derived(self) -> dict[str, tuple[str, str]]:
        slots = self.steps * self.global_batch * self.seq_len
        found = {
            "warm-up": (f"{self.warmup_steps} updates", "warmup_fraction x steps"),
            "token slots": (f"{slots:,}", "steps x global_batch x seq_len"),
        }
        if self.warmup_steps == self.warmup_at_least > 0:
            found["warm-up"] = (f"{self.warmup_steps} updates", "warmup_at_least")
        if self.schedule == "two_phase":
            found |= self._phases()
        return found

    def _phases(self) -> dict[str, tuple[str, str]]:
        from paperlm.train.schedule import rate_and_decay

        before, after = (rate_and_decay(update, self) for update in (self.phase_step - 1, self.phase_step))
        return {
            "second phase": (f"from update {self.phase_step:,} on", "phase_at x steps"),
            "rate at its start": (f"{before[0]:.4g} -> {after[0]:.4g}", "the two lines to the same end"),
            "weight decay at its start": (f"{before[1]:g} -> {after[1]:g}", "weight_decay, second_weight_decay"),
        }

    def behaviours(self) -> dict[str, int]:
        own = super().behaviours()
        if self.loss != MATERIALISED:
            from paperlm_kernels.behaviour import loss_behaviour

            own["linear_cross_entropy"] = loss_behaviour(self.loss)
        if self.fused_norms:
            from paperlm_kernels.behaviour import BITNET

            own["rmsnorm_quantize"] = BITNET["rmsnorm_quantize"]
        return own | (packed_bytes() if self.weights == "packed" else {})

    def snapshots(self) -> range:
        return range(self.steps)

    def settings(self) -> Pretrain:
        """What the training follows: a job that continues another one has that one's."""
        return self


def method_slug(norm: dict[str, Any]) -> str:
    """Short name of a method and its base, for file names."""
    own = norm["name"]
    if norm.get("preset", "").startswith("authors"):
        own += f".{norm['preset']}"
    return f"{own}.{method_slug(norm['base'])}" if isinstance(norm.get("base"), dict) else own


def model_slug(quantization: dict[str, Any] | None, sub_norm: bool, hidden_act: str) -> str:
    """`-` and the name of the preset that a model is, in file names; of a model without quantizers nothing."""
    if quantization is None:
        return ""
    return f"-{preset_name(quantization, sub_norm, hidden_act) or 'quantized'}"


def run(job: Pretrain, inputs: Inputs, machine: Machine) -> Result | None:
    """Train and evaluate; None on all but the leading process. Raises DataError, CheckpointError, Interrupted."""
    from paperlm.train.language_model import pretrain

    return pretrain(job, inputs, machine)
