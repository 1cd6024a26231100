"""The model's own loss, such as that of `use_fused_loss`, under trl's SFTTrainer.

    class Trainer(ModelLoss, trl.SFTTrainer): ...
    Trainer(use_fused_loss(model), args=SFTConfig(...), train_dataset=...).train()

SFTTrainer of trl 1.16 computes its loss in tiles from the head's weight, and asks no model for one; for another loss
it says to override `compute_loss`, which is what this does. The loss is that of transformers' Trainer then: the one
that the model returns for its labels.
"""

from __future__ import annotations

from contextvars import ContextVar

from transformers import Trainer

ASKED: ContextVar[bool] = ContextVar("the model is asked for its loss", default=False)
"While such a trainer is made."


class ModelLoss:
    """Goes in front of `SFTTrainer`, or a subclass of it, among the bases of a class.

    What SFTTrainer logs from the logits or in place of them (entropy, mean_token_accuracy, num_tokens) is not there.

    Raises TypeError in front of anything else, ValueError for loss_type="dft", which is no loss that a model returns.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if not any(base.__name__ == "SFTTrainer" for base in cls.__mro__[cls.__mro__.index(ModelLoss) :]):
            raise TypeError(
                f"ModelLoss goes in front of trl's SFTTrainer, class {cls.__name__}(ModelLoss, SFTTrainer); other "
                "trainers of trl have losses that no model returns"
            )

    def __init__(self, *args: object, **kwargs: object) -> None:
        token = ASKED.set(True)
        try:
            super().__init__(*args, **kwargs)
        finally:
            ASKED.reset(token)
        if self.args.loss_type != "nll":
            raise ValueError(
                f"loss_type={self.args.loss_type!r} is computed by SFTTrainer itself; leave ModelLoss out, or set "
                "loss_type='nll'"
            )

    def compute_loss(
        self, model: object, inputs: dict, return_outputs: bool = False, num_items_in_batch: object = None
    ) -> object:
        """The loss of transformers' Trainer, (loss, outputs) with return_outputs."""
        inputs["use_cache"] = False  # as SFTTrainer has it: checkpointed blocks cannot fill a cache
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
