"""The kernels compile for Hopper and Ampere without a GPU, fit their shared memory, and keep their accumulators in
registers."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from paperlm_kernels.cross_entropy import forward, gradient, products, reorder  # noqa: E402
from paperlm_kernels.cross_entropy.launch import AMPERE, HOPPER  # noqa: E402
from support_compile import SHARED, compile_for, spare_buffers, spilled  # noqa: E402

POINTERS = {
    "*bf16": "E E_rows C C_wide bias scratch q_rows q_columns d_hidden d_weight kept matrix saved",
    "*fp32": "upstream part_max part_sum target_logit base",
    "*i32": "rows targets control row_slots units unit_counts plan offsets group_counts order walks extra extra_until",
    "*i16": "row_groups row_starts slot_blocks group_blocks",
    "*i64": "ahead",
    "*i8": "alive maxima remainder",
    "fp32": "scale cap eps tiny log_eps",
}
LOGIT = {"HAS_BIAS": False, "HAS_CAP": True, "PRECISION": "ieee", "DTYPE": tl.bfloat16}


def compiled(kernel, blocks, constants, descriptors, architecture):
    types = {name: kind for kind, names in POINTERS.items() for name in names.split()}
    types |= {name: f"tensordesc<bf16[{r}, {c}]>" for name, (r, c) in descriptors.items()}
    if constants.get("PAIR") is False:
        types["d_hidden"] = "*fp32"
    aligned = {"D", "V", "stride_e", "stride_c", "N_PAD", "n_columns"}
    return compile_for(kernel, types, constants, aligned, architecture, *blocks)


def case(name, blocks, tma):
    BN, BK, *forward_rest = blocks.forward
    GK, *gradient_rest = blocks.gradient
    BD, PK, *product_rest = blocks.products
    of_q = {"TMA": tma, "BK": GK, **LOGIT}
    of_sums = {
        "TMA": tma, "BD": BD, "BK": PK, "HIDDEN": True, "WEIGHT": True, "PAIR": True, "ROUND": False,
        "PRECISION": "ieee", "CHUNK": 3,
    }  # fmt: skip
    strips = {"TMA": tma, "FLAT": False, "BN": BN, "BK": BK, **LOGIT}
    of_forward = {"E": (128, BK), "C": (BN, BK)}
    of_gradient = {"E": (128, GK), "C": (128, GK), "C_wide": (256, GK), "scratch": (128, 128)}
    of_products = {"E": (PK, BD), "C": (PK, BD), "q_rows": (128, PK), "q_columns": (PK, 128)}
    of_base = {n: LOGIT[n] for n in ("HAS_BIAS", "HAS_CAP", "PRECISION")} | {"BK": BK}
    cases = {
        "base": (forward.base_kernel, (8, 3), of_base, {}),
        "forward": (forward.forward_kernel, forward_rest, strips | {"MAXIMA": True, "KEEP": False}, of_forward),
        "forward, one loop": (
            forward.forward_kernel,
            forward_rest,
            strips | {"MAXIMA": True, "KEEP": False, "FLAT": True},
            of_forward,
        ),
        "forward, kept logits": (
            forward.forward_kernel,
            forward_rest,
            strips | {"MAXIMA": False, "KEEP": True},
            of_forward | {"kept": (128, BN)},
        ),
        "forward, kept logits, one loop": (
            forward.forward_kernel,
            forward_rest,
            strips | {"MAXIMA": False, "KEEP": True, "FLAT": True},
            of_forward | {"kept": (128, BN)},
        ),
        "gradient, kept tiles": (
            gradient.gradient_kernel,
            gradient_rest,
            of_q | {"LISTED": True, "FLAG": False},
            of_gradient,
        ),
        "gradient, all tiles": (
            gradient.gradient_kernel,
            gradient_rest,
            of_q | {"LISTED": False, "FLAG": True},
            of_gradient,
        ),
    } | {
        f"products, {which} tiles": (
            products.products_kernel,
            product_rest,
            of_sums | {"SOME": which != "all", "VISIT": visit},
            of_products,
        )
        for which, visit in (("kept", "listed"), ("some", "some"), ("all", "all"))
    }
    # with an order, which is for a filter that tests all tiles, one launch for dE and one for dC
    cases |= {
        f"{gradient_of}, {which} tiles": (
            products.products_kernel,
            product_rest,
            of_sums | {"SOME": which != "all", "VISIT": which, other: False},
            of_products,
        )
        for gradient_of, other in (("dE", "WEIGHT"), ("dC", "HIDDEN"))
        for which in ("some", "all")
    }
    in_float32 = of_sums | {"SOME": True, "VISIT": "listed", "PAIR": False}
    cases["products, float32 sums"] = (products.products_kernel, product_rest, in_float32, of_products)
    kernel, rest, constants, descriptors = cases[name]
    return kernel, rest, constants, descriptors if tma else {}


PRODUCTS = ["products, kept tiles", "products, some tiles", "products, all tiles", "products, float32 sums"]
PRODUCTS += ["dE, some tiles", "dC, some tiles"]


@pytest.mark.parametrize(
    "name,spill",
    [
        ("forward", 0),
        ("forward, one loop", 0),
        ("forward, kept logits", 64),
        ("forward, kept logits, one loop", 64),
        ("gradient, kept tiles", 4),
        # in the epilogue, once a unit: the filter's test beside two accumulators
        ("gradient, all tiles", 512),
        ("products, kept tiles", 0),
        ("products, some tiles", 0),
        ("products, all tiles", 0),
        ("products, float32 sums", 0),
        ("dE, some tiles", 0),
        ("dE, all tiles", 0),
        ("dC, some tiles", 0),
        ("dC, all tiles", 0),
    ],
)
def test_it_compiles_for_hopper_with_wgmma_and_tma(name, spill, tmp_path):
    function, rest, constants, descriptors = case(name, HOPPER, True)
    # softcap, bias, neither
    choices = [{"HAS_CAP": True}, {"HAS_BIAS": True, "HAS_CAP": False}, {"HAS_CAP": False}]
    for choice in choices if "HAS_CAP" in constants else [{}]:
        chosen = constants | choice
        kernel = compiled(function, rest, chosen, descriptors, 90)
        assert kernel.metadata.shared <= SHARED[90]
        assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async.bulk.tensor" in kernel.asm["ptx"]
        # a bias may take a register or two too many, once a tile
        assert spilled(kernel, tmp_path) <= spill + 8 * chosen.get("HAS_BIAS", False)
        assert spare_buffers(kernel) > 0


@pytest.mark.parametrize("architecture", [90, 80])
def test_rows_move_16_bytes_at_a_time_there_and_back(architecture, tmp_path):
    kernel = compiled(reorder.sort_kernel, (8, 1), {"ROWS": 16, "BLOCK": 512}, {}, architecture)
    assert "ld.global.v4.b32" in kernel.asm["ptx"] and "st.global.v4.b32" in kernel.asm["ptx"]
    assert architecture != 90 or spilled(kernel, tmp_path) == 0
    walks = [
        ("save", {"EVERY": False}),
        ("walk", {"EVERY": False}),
        ("walk", {"EVERY": True}),
        ("walk_cycles", {"ROWS": 64}),
    ]
    for name, constants in walks:
        walk = compiled(getattr(reorder, f"{name}_kernel"), (1, 1), constants | {"BLOCK": 256}, {}, architecture)
        assert all(f"{what}.global.v4.b32" in walk.asm["ptx"] for what in ("ld", "st"))
        assert architecture != 90 or spilled(walk, tmp_path) == 0


@pytest.mark.parametrize("architecture", [90, 80])
def test_both_halves_of_a_word_that_other_programs_double_are_read_and_written_at_once(architecture):
    doubling = compiled(reorder.double_kernel, (4, 1), {"BLOCK": 512}, {}, architecture).asm["ptx"]
    assert re.search(r"ld\.global[.\w]*\.b64", doubling) and re.search(r"st\.global[.\w]*\.b64", doubling)
    assert not re.search(r"(ld|st)\.global[.\w]*\.b(8|16|32)\b", doubling)


BY_POINTERS = [
    (name, constant)
    for name in ["base", "forward", "forward, one loop", "gradient, kept tiles", "gradient, all tiles", *PRODUCTS]
    for constant in (None, "HAS_BIAS", "ROUND")
    if constant is None or constant in case(name, HOPPER, False)[2]
]


@pytest.mark.parametrize("name,constant", BY_POINTERS)
def test_no_block_is_overwritten_that_a_product_reads_in_the_kernels_that_load_by_pointers(name, constant):
    function, rest, constants, descriptors = case(name, HOPPER, False)
    constants = constants if constant is None else constants | {constant: True}
    assert spare_buffers(compiled(function, rest, constants, descriptors, 90)) > 0


@pytest.mark.parametrize("name", ["forward", "gradient, kept tiles", "products, all tiles"])
def test_it_compiles_for_ampere_within_99_kib(name):
    kernel = compiled(*case(name, AMPERE, False), 80)
    assert kernel.metadata.shared <= SHARED[80]
    assert "mma.sync" in kernel.asm["ptx"]


def test_the_tiles_follow_the_device(monkeypatch):
    from paperlm_kernels.cross_entropy.launch import THIRTY_TWO_BIT, blocks_of

    assert blocks_of(torch.empty(1, dtype=torch.bfloat16)) is HOPPER
    assert blocks_of(torch.empty(1)) is THIRTY_TWO_BIT


class Recorder:
    """A kernel that notes what it is launched with, and its compiled form, which takes every argument by position."""

    arg_names = ("x", "wave", "n", "SIZE", "FLAG")

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(x, wave, n, *, SIZE, FLAG, num_warps):
            self.launches.append((grid, x, wave, n, SIZE, FLAG))
            return {(7, 1, 1): lambda *arguments: self.launches.append(((7,), *arguments))}

        return launch


def test_waves_after_the_first_get_the_same_arguments_in_the_order_of_the_signature():
    from paperlm_kernels.cross_entropy.repeated import WAVE, Repeated

    kernel = Recorder()
    launch = Repeated(kernel, 7, "x", WAVE, 3, FLAG=True, SIZE=64, num_warps=4)
    for wave in range(3):
        launch(wave)
    assert kernel.launches == [((7,), "x", wave, 3, 64, True) for wave in range(3)]
