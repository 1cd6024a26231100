"""The decoder a second time, in float64: one function for each method's block, as its paper has the equations."""

import math

import pytest
import torch

from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM

WIDTH, FFN, HEADS, VOCAB = 24, 21, 3, 37
ATTN, MLP = "attention_residual", "mlp_residual"


def model_of(norm, n_layers=3):
    """A float64 decoder whose every parameter, learned factors included, is random."""
    n_layers = 12 if norm.get("preset") == "authors_shared" else n_layers
    sizes = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    config = PaperLlamaConfig(**sizes, num_hidden_layers=n_layers, norm=norm)
    model = PaperLlamaForCausalLM(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * (1.0 if "embed" in name else 0.25) if p.ndim == 2 else 1.0 + 0.3 * noise)
    return model


def tokens(batch=3, length=11, seed=1):
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- the decoder a second time: one function per wiring; w holds the weights of one block ---


def rms(u, gain):
    return gain * u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def group(axes):
    def norm(u, gain, bias):
        u = u.unflatten(-1, (8, -1))
        u = (u - u.mean(axes, keepdim=True)) / (u.var(axes, correction=0, keepdim=True) + 1e-5).sqrt()
        return gain * u.flatten(-2) + bias

    return norm


def attention(u, w):
    """Rotary embedding as a product of complex numbers: feature i is the real part, i + half the imaginary one."""
    q, k, v = ((u @ w[f"attention.{n}_proj.weight"].T).unflatten(-1, (HEADS, -1)) for n in "qkv")
    half, seq = WIDTH // HEADS // 2, u.shape[1]
    angle = torch.outer(torch.arange(seq), 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half))
    turn = torch.complex(angle.cos().float().double(), angle.sin().float().double())[:, None]  # the tables are float32
    q, k = (torch.view_as_real(torch.complex(x[..., :half], x[..., half:]) * turn).flatten(-2) for x in (q, k))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2 * half)
    scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2) @ w["attention.o_proj.weight"].T


def swiglu(u, w):
    gate, up = u @ w["mlp.gate_proj.weight"].T, u @ w["mlp.up_proj.weight"].T
    return (gate / (1 + (-gate).exp()) * up) @ w["mlp.down_proj.weight"].T


def pre(x, w, layer, a=1.0, b=1.0):
    y = x + a * attention(rms(x, w[f"{ATTN}.pre_norm.weight"]), w)
    return y + b * swiglu(rms(y, w[f"{MLP}.pre_norm.weight"]), w)


def post(x, w, layer, a=1.0, b=1.0):
    y = rms(a * x + attention(x, w), w[f"{ATTN}.out_norm.weight"])
    return rms(b * y + swiglu(y, w), w[f"{MLP}.out_norm.weight"])


def deep(a):
    return lambda x, w, layer: post(x, w, layer, a, a)


def admin(second):
    return lambda x, w, layer: post(x, w, layer, w[f"{ATTN}.residual_scale"], w[f"{second}.residual_scale"])


def mix(m):
    return lambda x, w, layer: post(x, w, layer) if layer <= m else pre(x, w, layer)


def sandwich(x, w, layer):
    y = x + rms(attention(rms(x, w[f"{ATTN}.pre_norm.weight"]), w), w[f"{ATTN}.post_norm.weight"])
    return y + rms(swiglu(rms(y, w[f"{MLP}.pre_norm.weight"]), w), w[f"{MLP}.post_norm.weight"])


def grouped(axes):
    def block(x, w, layer):
        y = x + attention(group(axes)(x, w[f"{ATTN}.pre_norm.weight"], w[f"{ATTN}.pre_norm.bias"]), w)
        return y + swiglu(group(axes)(y, w[f"{MLP}.pre_norm.weight"], w[f"{MLP}.pre_norm.bias"]), w)

    return block


def layer_scale(second):
    return lambda x, w, layer: pre(x, w, layer, w[f"{ATTN}.branch_scale"], w[f"{second}.branch_scale"])


def lns(x, w, layer):
    y = x + attention(rms(x, w[f"{ATTN}.pre_norm.weight"]) / math.sqrt(layer), w)
    return y + swiglu(rms(y, w[f"{MLP}.pre_norm.weight"]) / math.sqrt(layer), w)


def peri(x, w, layer):
    return sandwich(rms(x, w["entry"]) if layer == 1 else x, w, layer)


def gated(x, w, layer):
    gate = w[f"{ATTN}.gate"]
    factor = 1 - gate / (1 + (-gate).exp())
    y = factor * (x + attention(rms(x, w[f"{ATTN}.pre_norm.weight"]), w))
    return factor * (y + swiglu(rms(y, w[f"{MLP}.pre_norm.weight"]), w))


def siamese(state, w, layer):
    x, y = (state, state) if layer == 1 else state
    for place, f in ((ATTN, attention), (MLP, swiglu)):
        x = rms(x, w[f"{place}.x_norm.weight"])
        h = f(rms(x + rms(y, w[f"{place}.y_norm.weight"]), w[f"{place}.in_norm.weight"]), w)
        x, y = x + h / math.sqrt(2 * layer), y + h
    return x, y


def reference_logits(model, ids, block, embed_factor=1.0):
    weights = model.state_dict()
    x = embed_factor * weights["model.embed_tokens.weight"][ids]
    for layer in range(1, model.config.num_hidden_layers + 1):
        prefix = f"model.layers.{layer - 1}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        x = block(x, own | {"entry": weights.get("model.entry.weight")}, layer)
    if isinstance(x, tuple):
        x = rms(x[0], weights["model.exit.x_norm.weight"]) + rms(x[1], weights["model.exit.y_norm.weight"])
    return rms(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm_of(name, **options):
    return {"name": name, **options}


PRE, POST, LNS = norm_of("pre_ln"), norm_of("post_ln"), norm_of("layernorm_scaling")
MIX, MIX3 = norm_of("mix_ln", post_layers=2), norm_of("mix_ln", post_layers=3)
LEAK, TAKASE = norm_of("group_ln", preset="authors_sequence"), "sqrt(2/(5d))"
TWICE_WRAPPED = norm_of("scaled_init", base=norm_of("scaled_embed", base=MIX, preset="multiplier"))
CASES = [  # norm, block, embedding factor
    (PRE, pre, 1),
    (POST, post, 1),
    (MIX, mix(2), 1),
    (norm_of("mix_ln", post_fraction="1/3"), mix(1), 1),
    (norm_of("deep_norm"), deep(6**0.25), 1),
    (norm_of("deep_norm", preset="authors_public"), deep(2.8284271), 1),
    (norm_of("deep_norm", preset="authors_dev"), deep(6**0.25), 1),
    (norm_of("admin"), admin(MLP), 1),
    (norm_of("admin", preset="authors_scalar_0p015"), admin(ATTN), 1),
    (norm_of("sandwich_ln"), sandwich, 1),
    (norm_of("group_ln"), grouped((-1,)), 1),
    (LEAK, grouped((1, -1)), 1),
    (norm_of("scaled_embed", base=LEAK), grouped((1, -1)), 1),
    (norm_of("layer_scale"), layer_scale(MLP), 1),
    (norm_of("layer_scale", preset="authors_shared"), layer_scale(ATTN), 1),
    (LNS, lns, 1),
    (norm_of("scaled_init", base=PRE), pre, 1),
    (norm_of("scaled_init", base=MIX, base_std=TAKASE), mix(2), 1),
    (norm_of("scaled_embed", base=LNS), lns, 1),
    (norm_of("scaled_embed", base=PRE, preset="multiplier"), pre, WIDTH**0.5),
    (TWICE_WRAPPED, mix(2), WIDTH**0.5),
    (norm_of("peri_ln"), peri, 1),
    (norm_of("scaled_init", base=norm_of("peri_ln")), peri, 1),
    (norm_of("gpas", base=PRE), gated, 1),
    (norm_of("siamese_norm"), siamese, 1),
    (norm_of("scaled_embed", base=norm_of("siamese_norm")), siamese, 1),
]
IDS = [" ".join(str(v if isinstance(v, str | int) else v["name"]) for v in norm.values()) for norm, _, _ in CASES]
each_case = pytest.mark.parametrize(("norm", "block", "embed_factor"), CASES, ids=IDS)
