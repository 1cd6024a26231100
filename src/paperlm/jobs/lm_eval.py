"""Multiple-choice tasks through lm-evaluation-harness: accuracies of a model, as in tables of fine-tuned models."""

from __future__ import annotations

from typing import ClassVar

from paperlm.evaluate.questions import AskedModel, ask, check_items
from paperlm.jobs.base import Inputs, KVCacheOptions, Machine
from paperlm.result import Result


class LmEval(AskedModel):
    """Accuracies of one model on tasks of lm-evaluation-harness, by the likelihood of each option."""

    kind: ClassVar[str] = "lm_eval"
    summary: ClassVar[str] = "multiple-choice tasks through lm-evaluation-harness"

    kv_cache: KVCacheOptions = None
    "numbers of queries, keys and values, as the model's configuration has it; null: as it was trained"

    def slug(self) -> str:
        """lm_eval-5shot-<parent's>."""
        cache = "" if self.kv_cache is None else f"-q{self.kv_cache['q_bits']}_kv{self.kv_cache['kv_bits']}"
        return f"lm_eval-{self.few_shot}shot{cache}-{self.of.slug()}"


def run(job: LmEval, inputs: Inputs, machine: Machine) -> Result:
    """Evaluate. Raises DataError for unusable items, before the model is read, and JobError for an unusable model."""
    from paperlm.models.folder import model_with_cache

    check_items(job, inputs)
    model = model_with_cache(inputs.models["of"], job.kv_cache).to(machine.torch_device())
    return ask(job, model, inputs, machine)[0]
