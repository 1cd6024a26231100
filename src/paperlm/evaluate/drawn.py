"""A model of some shape whose weights are drawn at random: settings that jobs share, and the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from paperlm.evaluate.stores import StoreSettings, put_into_stores


class DrawnModel(StoreSettings):
    """Settings of a job about a model of some shape, with weights from N(0, std^2) that are stored."""

    architecture: Literal["llama", "t5"]
    "transformers' LLaMA, or its T5: an encoder and a decoder of n_layers blocks each"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int | None = Field(None, gt=0)
    "of llama: heads of keys and values; null: as many as n_heads"
    head_size: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=2)
    tied: bool = False
    "of llama: the head is the embedding, as T5's is"
    in_float32: list[str] = []
    "weights with one of these in their name are not stored, and lie in float32"
    std: float = Field(gt=1e-30, lt=1e30)
    "standard deviation of the weights"

    @model_validator(mode="after")
    def options_are_of_the_architecture(self) -> DrawnModel:
        if self.n_kv_heads is not None and self.architecture != "llama":
            raise ValueError(f"n_kv_heads is of llama; leave it out for {self.architecture}")
        if self.architecture == "llama" and self.hidden_size % self.n_heads:
            raise ValueError(
                f"n_heads: {self.n_heads} does not divide hidden_size, {self.hidden_size}, as of any llama"
            )
        if self.tied and self.architecture != "llama":
            raise ValueError(f"tied is of llama; the head of {self.architecture} is its embedding: leave it out")
        if self.policy == "all_linear" and (self.tied or self.architecture == "t5"):
            raise ValueError("policy: the head is the embedding: say all to store both, or paper for neither")
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads: {self.n_kv_heads} does not divide n_heads, {self.n_heads}")
        return self

    def proxy(self) -> str:
        return f"a checkpoint's weights: drawn from N(0, {self.std:g}^2)"

    def slug(self) -> str:
        apart = "" if self.policy == "paper" else f"-{self.policy}"
        apart += "-float32" if self.in_float32 else ""
        shape = f"{self.architecture}_{self.n_layers}x{self.hidden_size}x{self.intermediate_size}"
        return f"{self.kind}-{self.stored_as()}{apart}-{shape}"


def model_of(job: DrawnModel, device: Any) -> Any:
    """transformers' model on a device, whole and in PyTorch's default dtype; on "meta" names and shapes alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    if job.architecture == "llama":
        config: Any = LlamaConfig(
            vocab_size=job.vocab_size, hidden_size=job.hidden_size, intermediate_size=job.intermediate_size,
            num_hidden_layers=job.n_layers, num_attention_heads=job.n_heads, head_dim=job.head_size,
            num_key_value_heads=job.n_kv_heads or job.n_heads, tie_word_embeddings=job.tied,
        )  # fmt: skip
        cls: Any = LlamaForCausalLM
    else:
        config = T5Config(
            vocab_size=job.vocab_size, d_model=job.hidden_size, d_ff=job.intermediate_size, d_kv=job.head_size,
            num_layers=job.n_layers, num_heads=job.n_heads,
        )  # fmt: skip
        cls = T5ForConditionalGeneration
    with torch.device(device):
        return cls(config)


def drawn_into_stores(job: DrawnModel, device: Any) -> Any:
    """The model in bfloat16 on a device, all matrices from N(0, std^2) and vectors (norms) as transformers makes them,
    in its stores, ready to be evaluated. It lies there whole before: 16 GB of an 8B model."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_of(job, device)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, job.std, generator=generator)
    return put_into_stores(model.eval(), job, device, job.in_float32)
