"""Rewards of policy optimization in a shared unit, and what a policy earns on prompts that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from paperlm.errors import JobError
from paperlm.finetune import measure
from paperlm.finetune.examples import Example, encode

if TYPE_CHECKING:
    from paperlm.jobs.rloo import RLOO


class Reward:
    """A reward model's score in standard deviations of a baseline's samples, 0 at their mean.

    Raises JobError if the scores of the baseline are not finite, or all equal.
    """

    def __init__(self, model: Any, tokenizer: Any, baseline: list[Example], numerics: str) -> None:
        self.model, self.tokenizer, self.numerics = model, tokenizer, numerics
        raw = measure.scores(model, [e.ids for e in baseline], numerics)
        self.mean, self.deviation = float(raw.mean()), float(raw.std(ddof=1))
        if not (np.isfinite(self.deviation) and self.deviation > 0):
            raise JobError(
                f"the reward model scores the baseline's samples with mean {self.mean} and standard deviation "
                f"{self.deviation}: no unit for rewards; train it again, longer or at a lower rate"
            )

    def of(self, sequences: list[list[int]]) -> np.ndarray:
        """Rewards of prompts with their answers, as ids."""
        return (measure.scores(self.model, sequences, self.numerics) - self.mean) / self.deviation

    def of_texts(self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list:
        """As trl asks for rewards: a prompt's text and the ids that were sampled behind it."""
        known = {prompt: encode(self.tokenizer, prompt) for prompt in set(prompts)}
        return self.of([known[p] + ids for p, ids in zip(prompts, completion_ids, strict=True)]).tolist()


class HeldOut:
    """Samples on held-out prompts, always drawn with the seed of the job, and comparisons of them."""

    def __init__(self, job: RLOO, tokenizer: Any, prompts: list[str]) -> None:
        self.job, self.tokenizer = job, tokenizer
        self.prompts = [encode(tokenizer, prompt) for prompt in prompts]

    def sample(self, model: Any) -> list[Example]:
        """`job.samples` answers to each prompt, those of a prompt in a row."""
        job = self.job
        answers = measure.sample(
            model,
            self.tokenizer,
            self.prompts,
            each=job.samples,
            length=job.answer_length,
            temperature=job.temperature,
            seed=job.seed,
            numerics=job.numerics,
        )
        asked = [prompt for prompt in self.prompts for _ in range(job.samples)]
        return [Example([*p, *a], len(p)) for p, a in zip(asked, answers, strict=True)]

    def compare(
        self, rewards: dict[str, Reward], before: list[Example], after: list[Example], policy: Any, reference: Any
    ) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
        """Metrics and their standard errors, over prompts: rewards before and after, the gain, KL, length.

        The KL is estimated from the samples after training: mean of log policy - log reference, summed over an answer.
        """
        for name, reward in rewards.items():
            old, new = (self._by_prompt(reward.of([e.ids for e in found])) for found in (before, after))
            yield self._named({f"{name}_before": old, f"{name}_after": new, f"{name}_gain": new - old})
        logs = [
            measure.answer_log_probs(m, after, self.job.temperature, self.job.numerics) for m in (policy, reference)
        ]
        lengths = [np.array([len(e.ids) - e.answer for e in found], dtype=float) for found in (before, after)]
        old, new = map(self._by_prompt, lengths)
        yield self._named({"kl": self._by_prompt(logs[0] - logs[1]), "length_before": old, "length_after": new})

    def _by_prompt(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(len(self.prompts), self.job.samples).mean(1)

    def _named(self, per_prompt: dict[str, np.ndarray]) -> tuple[dict[str, float], dict[str, float]]:
        found = {name: measure.mean_and_error(values) for name, values in per_prompt.items()}
        return {name: mean for name, (mean, _) in found.items()}, {name: error for name, (_, error) in found.items()}
