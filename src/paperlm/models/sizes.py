"""Shapes of the papers' models. Torch-free: paper files refer to these by name.

Source, unless a size says otherwise: configs/llama_*.json of pixeli99/MixLN at ff45826 and Table 7 of Mix-LN. They
disagree at 250M, where the table prints hidden size 1024; only 768, the configuration file's value, gives 247 million
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A shape, such as a row of Mix-LN Table 7, plus the exact parameter count, of a decoder with an untied vocabulary
    of 32,000."""

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_layers: int
    parameters: int
    source: str


SIZES = {
    "71M": Size(512, 1368, 8, 12, 70_578_688, "Mix-LN Table 7; configs/llama_71m.json"),
    "130M": Size(768, 2048, 12, 12, 134_105_856, "Mix-LN Table 7; configs/llama_130m.json"),
    "250M": Size(768, 2560, 16, 24, 247_370_496, "configs/llama_250m.json (Mix-LN Table 7 prints hidden 1024)"),
    "250M_table7": Size(1024, 2560, 16, 24, 354_993_152, "Mix-LN Table 7 as printed; no released model has this shape"),
    "350M": Size(1024, 2736, 16, 24, 367_969_280, "Curse of Depth; authors' log prints 367.97M"),
    "1B": Size(2048, 5461, 32, 24, 1_339_082_752, "Mix-LN Table 7; configs/llama_1b.json"),
    "phi3.5-mini": Size(3072, 8192, 32, 32, 3_820_686_336, "config.json of Phi-3.5-mini: a LLaMA in other names"),
    "gpt2": Size(768, 2048, 12, 12, 134_105_856, "GPT-2's width, heads and depth; 8/3 of the width for three matrices"),
    "7B": Size(4096, 11008, 32, 32, 6_738_415_616, "Mix-LN Table 7; configs/llama_7b.json"),
    "bitnet_700M": Size(1536, 4096, 24, 24, 777_856_512, "BitNet a4.8 Table 6"),
    "bitnet_1.3B": Size(2048, 5460, 32, 24, 1_338_935_296, "BitNet a4.8 Table 6"),
    "bitnet_3B": Size(3200, 8640, 32, 26, 3_426_473_600, "BitNet a4.8 Table 6; heads of 100"),
    "bitnet_7B": Size(4096, 11008, 32, 32, 6_738_415_616, "BitNet a4.8 Table 6; LLaMA-7B's shape"),
    "bitnet_2B": Size(2560, 6912, 20, 30, 2_542_952_960, "BitNet a4.8 Table 5 names no shape; that of b1.58 2B4T"),
    "neuzip_2.7B": Size(
        2560,
        6912,
        20,
        32,
        2_701_560_320,
        "NeuZip: GPT-Neo 2.7B, a gated feed-forward",
    ),
    "neuzip_8B": Size(4096, 14336, 32, 32, 8_047_038_464, "NeuZip: Llama-3 8B, no shared keys and values"),
    "neuzip_13B": Size(5120, 13824, 40, 40, 13_015_864_320, "NeuZip: Llama-2 13B"),
    "P0": Size(256, 688, 4, 12, 25_876_736, "ours: a proxy of BitNet a4.8's sizes, 1/70 of its 700M"),
    "P1": Size(512, 1376, 8, 12, 70_726_144, "ours: a proxy of BitNet a4.8's sizes, 1/18 of its 700M"),
    "P2": Size(768, 2048, 12, 12, 134_105_856, "ours: a proxy of BitNet a4.8's sizes, 1/8 of its 700M"),
}


VIT_SIZES = {
    "ViT-Tiny": Size(192, 768, 3, 12, 5_717_416, "assumed: DeiT-Tiny (arXiv 2012.12877, Table 1)"),
    "ViT-Small": Size(384, 1536, 6, 12, 22_050_664, "assumed: DeiT-Small (arXiv 2012.12877, Table 1)"),
}
"Shapes of image classifiers; parameters with patches of 16 of 224 pixels, three channels and 1,000 classes."

ALL_SIZES = SIZES | VIT_SIZES


def block_weights(hidden_size: int, intermediate_size: int, n_layers: int) -> int:
    """Numbers in the seven weight matrices of all blocks: what BitNet quantizes, and counts as a model's parameters."""
    return n_layers * (4 * hidden_size**2 + 3 * hidden_size * intermediate_size)


def parameter_count(
    hidden_size: int,
    intermediate_size: int,
    n_layers: int,
    vocab_size: int = 32_000,
    norms_per_block: int = 2,
    *,
    sub_norm: bool = False,
    tied: bool = False,
) -> int:
    """Trained numbers of the decoder: embedding and head, one matrix if they are `tied`, blocks, final norm.

    `sub_norm`: with the norms in front of the output and down projections.
    """
    norms = norms_per_block * hidden_size + (hidden_size + intermediate_size if sub_norm else 0)
    blocks = block_weights(hidden_size, intermediate_size, n_layers) + n_layers * norms
    return (1 if tied else 2) * vocab_size * hidden_size + blocks + hidden_size


def bytes_in_training(parameters: int, numerics: str, moments: int = 2, gradients: bool = True) -> int:
    """Weights, gradients and the optimizer's moments, all in the dtype of the weights: bfloat16 in `pure_bf16`, else
    float32. `gradients`: False where each is gone before the next one is there."""
    return parameters * (2 if numerics == "pure_bf16" else 4) * (1 + gradients + moments)


def flops_per_token(hidden_size: int, intermediate_size: int, n_layers: int, vocab_size: int, seq_len: int) -> float:
    """Floating-point operations to train on one token: 6 per matrix parameter, plus causal attention scores.

    Scores and their weighted sum cost 4 * seq_len * hidden_size a token and block forward, half of it under the
    causal mask, three times that with the backward pass.
    """
    matrices = block_weights(hidden_size, intermediate_size, n_layers) + vocab_size * hidden_size
    return 6.0 * matrices + 6.0 * n_layers * seq_len * hidden_size


def flops_per_image(
    hidden_size: int, intermediate_size: int, n_layers: int, tokens: int, patch_values: int, classes: int
) -> float:
    """Floating-point operations to train a vision transformer on one image of so many tokens, the class token included.

    6 per matrix parameter and token, and 12 * tokens * hidden_size a token and block for attention over all tokens.
    """
    block = tokens * (6 * (4 * hidden_size**2 + 2 * hidden_size * intermediate_size) + 12 * tokens * hidden_size)
    return float(n_layers * block + 6 * hidden_size * ((tokens - 1) * patch_values + classes))
