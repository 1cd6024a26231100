"""The kernels for models in few bits compile for Hopper and Ampere without a GPU: matrix units, wide accesses, no
spilled registers."""

from __future__ import annotations

import os
import re

import pytest
import torch

triton = pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from paperlm_kernels.kv_attention import kernel as kv  # noqa: E402
from paperlm_kernels.kv_attention.kernel_bytes import decode_bytes_kernel  # noqa: E402
from paperlm_kernels.kv_attention.launch import tiles_of as decode_tiles  # noqa: E402
from paperlm_kernels.kv_attention.layout import KVLayout  # noqa: E402
from paperlm_kernels.rmsnorm_quantize import kernel as norm  # noqa: E402
from paperlm_kernels.rmsnorm_quantize.launch import _block  # noqa: E402
from paperlm_kernels.rmsnorm_quantize.modes import MODES  # noqa: E402
from paperlm_kernels.ternary_linear import gemm, gemv  # noqa: E402
from paperlm_kernels.ternary_linear.launch import Tiles, few_tiles_of, tiles_of, token_tiles_of  # noqa: E402
from support_compile import SHARED, compile_for, spare_buffers, spilled, waits_first  # noqa: E402

both = pytest.mark.parametrize("architecture", [90, 80])
LINEAR = {
    "x": "*i8", "weight": "*i8", "scale": "*fp32", "rowsum": "*i32", "alpha": "*fp32", "y": "*bf16", "work": "*i32",
    "arrived": "*i32", "places": "*i32", "counts": "*i32",
}  # fmt: skip
WORDS = {**LINEAR, "x": "*i32", "weight": "*i32"}
SIZES = [(N, K) for d, f in ((1536, 4096), (2048, 5460), (3200, 8640), (4096, 11008))
         for N, K in ((3 * d, d), (d, d), (2 * f, d), (d, f))]  # fmt: skip
"Matrices of a block of 700M, 1.3B, 3B and 7B: (rows, columns)."


def asked_ahead(ptx):
    """For how many pieces of memory it is asked, all of them before the end of the kernel in front."""
    asked = [at.start() for at in re.finditer(r"cp\.async\.bulk\.prefetch\.L2", ptx)]
    assert not asked or asked[-1] < ptx.index("griddepcontrol.wait")
    return len(asked)


def all_tiles():
    """Every form that tiles take for these matrices and 16, 256 and 4096 tokens on a card of 132 multiprocessors."""
    forms = {tiles_of(M, N, -(-K // 128) * 32, 132) for M in (5, 16, 32, 64, 256, 4096) for N, K in SIZES}
    return sorted({(t.tokens, t.rows, t.step, t.warps, t.stages, t.splits > 1) for t in forms})


@both
@pytest.mark.parametrize("tokens,rows,step,warps,stages,split", all_tiles())
def test_the_products_are_on_the_matrix_units_with_the_weights_in_registers(
    tokens, rows, step, warps, stages, split, architecture, tmp_path
):
    tiles = Tiles(tokens, rows, step, warps, stages)
    constants = {
        "BM": tokens, "BN": rows, "BYTES": step, "GROUP": tiles.group, "SPLIT": split, "SWAP": tiles.swap,
        "DENSE": False, "GATED": False, "ASM": True,
    }  # fmt: skip
    if architecture == 80:
        stages = 2  # of the 99 KiB of the smaller cards
    kernel = compile_for(gemm.gemm_kernel, LINEAR, constants, {"width", "N"}, architecture, warps, stages)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED[architecture]
    # 16 bytes at a time: what is read ahead, unless a thread has less of the activations, and the rows that are stored
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*?(0x\w+|\d+), ", ptx)
    assert {int(size, 0) for size in copies} == {16, min(16, tokens * step // (32 * warps))}
    assert not re.search(r"st\.global[.\w]*\.b(8|16)\b", ptx)
    if architecture == 90:
        assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8", ptx)
        assert spilled(kernel, tmp_path) == 0
        assert spare_buffers(kernel) > 0
    else:
        assert "mma.sync" in ptx and "s8" in ptx


@both
@pytest.mark.parametrize("tokens,rows,split,gather", [(1, 1536, True, False), (1, 9600, False, False),
                                                      (1, 22016, False, False), (2, 3200, False, False),
                                                      (4, 3200, False, False), (1, 8192, False, True)])  # fmt: skip
def test_few_tokens_take_four_products_an_instruction_from_16_bytes_of_weights(
    tokens, rows, split, gather, architecture, tmp_path
):
    few, pdl = few_tiles_of(tokens, rows, 132), architecture == 90
    constants = {
        "BM": tokens, "BN": few.rows, "WORDS": few.words, "STAGES": few.stages, "SPLIT": split, "GATHER": gather,
        "GATED": False, "ASM": True, "AHEAD": False, "PDL": pdl,
    }  # fmt: skip
    # no size is said to be a multiple of 16: of 3200 columns neither words nor chunks are
    kernel = compile_for(gemv.gemv_kernel, WORDS, constants, set(), architecture, few.warps, 3, launch_pdl=pdl)
    ptx = kernel.asm["ptx"]
    if pdl:  # the kernel in front has ended before anything of memory is read
        assert waits_first(ptx) and asked_ahead(ptx) == 0
    # a thread has 16 words of weights for each token, of four codes in each of their four planes
    assert ptx.count("dp4a") == 16 * 4
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)  # ahead of their use
    assert architecture != 90 or spilled(kernel, tmp_path) == 0


@pytest.mark.parametrize("ahead,gated,split", [(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize("rows,columns", [(12288, 4096), (4096, 11008), (9600, 3200), (22016, 4096)])
def test_a_token_on_hopper_takes_16_bytes_of_weights_a_thread_at_a_time(rows, columns, ahead, gated, split, tmp_path):
    few = token_tiles_of(rows, columns // 4, 132)
    constants = {
        "BM": 1, "BN": few.rows, "WORDS": few.words, "STAGES": few.stages, "SPLIT": bool(split), "GATHER": False,
        "GATED": bool(gated), "ASM": True, "AHEAD": bool(ahead), "PDL": True,
    }  # fmt: skip
    kernel = compile_for(gemv.gemv_kernel, WORDS, constants, set(), 90, few.warps, 3, launch_pdl=True)
    # weights are asked for, and the next kernel let in, before the end of the one in front
    assert waits_first(kernel.asm["ptx"], *(["griddepcontrol.launch"] if ahead else []))
    assert asked_ahead(kernel.asm["ptx"]) == ahead * (1 + gated)
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", kernel.asm["ptx"]) and spilled(kernel, tmp_path) == 0


@pytest.mark.parametrize("rows,columns", [(22016, 4096), (17280, 3200)])
@pytest.mark.parametrize("tokens", [16, 256])
def test_a_gated_product_stays_on_the_matrix_units_without_spills(tokens, rows, columns, tmp_path):
    t = tiles_of(tokens, rows, columns // 4, 132)
    constants = {
        "BM": t.tokens, "BN": t.rows, "BYTES": t.step, "GROUP": t.group, "SPLIT": t.splits > 1, "SWAP": t.swap,
        "DENSE": False, "GATED": True, "ASM": True,
    }  # fmt: skip
    kernel = compile_for(gemm.gemm_kernel, LINEAR, constants, {"width", "N"}, 90, t.warps, t.stages)
    assert kernel.metadata.shared <= SHARED[90] and spilled(kernel, tmp_path) == 0 and spare_buffers(kernel) > 0
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8", kernel.asm["ptx"])


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_gated_product_of_few_tokens_reads_16_bytes_of_weights(tokens, tmp_path):
    few = few_tiles_of(tokens, 17280, 132)
    constants = {
        "BM": tokens, "BN": few.rows, "WORDS": few.words, "STAGES": few.stages, "SPLIT": False, "GATHER": False,
        "GATED": True, "ASM": True, "AHEAD": False, "PDL": False,
    }  # fmt: skip
    kernel = compile_for(gemv.gemv_kernel, WORDS, constants, set(), 90, few.warps, 3)
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", kernel.asm["ptx"]) and spilled(kernel, tmp_path) == 0


@both
def test_the_sparse_product_along_k_compiles_without_spills(architecture, tmp_path):
    constants = {"BYTES": 128, "ROWS": 16, "SPLIT": True}
    kernel = compile_for(gemv.columns_kernel, LINEAR, constants, {"width", "N"}, architecture, 4, 3)
    assert architecture != 90 or spilled(kernel, tmp_path) == 0


def test_the_list_of_open_gates_is_made_in_registers(tmp_path):
    types = {"gate": "*bf16", "places": "*i32", "counts": "*i32"}
    kernel = compile_for(gemv.places_kernel, types, {"BLOCK": 16384}, {"N", "stride"}, 90, 32, 3)
    assert spilled(kernel, tmp_path) == 0


NORM = dict.fromkeys(
    ("x", "up", "gain", "residual", "stream", "values", "d_values", "d_stream", "d_x", "d_up"), "*bf16"
)
NORM |= {"codes": "*i8", "rowsum": "*i32", "places": "*i32", "counts": "*i32"}
NORM |= dict.fromkeys(("scale", "rstds", "d_gain"), "*fp32")
NORM |= dict.fromkeys(("eps", "levels", "low", "high", "multiple"), "fp32")
ROW = {"D", "padded", "x_stride", "up_stride", "residual_stride"}


@pytest.mark.parametrize(
    "width,mode,kind",
    [(4096, mode, "plain") for mode in MODES]
    + [(width, "int8_absmax", kind) for width in (1536, 4096, 11008) for kind in ("residual and topk", "glu")],
)
def test_a_row_is_normalized_and_quantized_in_registers(width, mode, kind, tmp_path):
    block, warps = _block(width)
    chosen = MODES[mode]
    constants = {
        "GLU": kind == "glu", "NORM": True, "RESIDUAL": kind == "residual and topk", "MEAN": chosen.mean,
        "TOPK": kind == "residual and topk", "E2M1": chosen.e2m1, "CODES": True, "VALUES": False,
        "COMPACT": kind == "glu", "BLOCK": block, "PDL": True,
    }  # fmt: skip
    kernel = compile_for(norm.norm_quantize_kernel, NORM, constants, ROW, 90, warps, 3, launch_pdl=True)
    ptx = kernel.asm["ptx"]
    assert waits_first(ptx) and asked_ahead(ptx) == (block <= 8192)  # of the gains
    assert spilled(kernel, tmp_path) <= 4  # a number, once a row
    assert re.search(r"ld\.global[.\w]*\.v4\.b32", ptx)
    # a ratio is computed once a row; what is done for each number is a product
    assert ptx.count("div.rn.f32") <= 4


@pytest.mark.parametrize("width,keep", [(3200, True), (8640, False), (11008, False)])
def test_codes_and_values_of_training_are_made_in_registers(width, keep, tmp_path):
    block, warps = _block(width)
    constants = {
        "GLU": False, "NORM": True, "RESIDUAL": False, "MEAN": False, "TOPK": keep, "E2M1": False, "CODES": True,
        "VALUES": True, "COMPACT": False, "BLOCK": block, "PDL": False,
    }  # fmt: skip
    kernel = compile_for(norm.norm_quantize_kernel, NORM, constants, ROW, 90, warps, 3)
    assert spilled(kernel, tmp_path) <= 4  # a number, once a row


@pytest.mark.parametrize("width", [1536, 4096, 11008])
@pytest.mark.parametrize("glu", [False, True])
def test_the_gradient_of_a_row_stays_in_registers(width, glu, tmp_path):
    block, warps = _block(width)
    constants = {"GLU": glu, "NORM": True, "STREAM": not glu, "BLOCK": block}
    kernel = compile_for(norm.norm_backward_kernel, NORM, constants, ROW, 90, warps, 3)
    # gate, up, incoming, normalized, gain and the sum of the gain's gradient, 16384 numbers each, are a few too many
    assert spilled(kernel, tmp_path) <= (256 if glu and width > 8192 else 0)


CACHE = {name: "*u8" for name in ("k_data", "v_data", "k_first", "v_first")}
CACHE |= dict.fromkeys(("k_steps", "v_steps"), "*fp16") | dict.fromkeys(("cos", "sin", "parts", "stats"), "*fp32")
CACHE |= dict.fromkeys(("q", "k", "v", "turned"), "*bf16") | {"lengths": "*i32"}
CACHE |= dict.fromkeys(
    ("levels", "zero", "most", "first_levels", "first_zero", "scale", "q_levels", "q_zero"), "fp32"
)  # fmt: skip
heads = pytest.mark.parametrize("bits,head_dim", [(bits, d) for bits in (3, 4) for d in (64, 100, 128)])


@heads
def test_appending_and_merging_compile_without_spills(bits, head_dim, tmp_path):
    layout = KVLayout(head_dim, bits)
    sizes = [planes.size for planes in layout.planes]
    common = {"FIRST": bits == 3, "SYMMETRIC": True, "D": head_dim, "PDL": True}
    rows = {"row_bytes": layout.row_bytes, "low_bytes": sizes[0], "high_bytes": sum(sizes[1:])}
    power = triton.next_power_of_2
    append = rows | {"THREE": bits == 3, "ROTATE": True, "HALF": power(head_dim // 2), "QUARTER": power(head_dim // 4)}
    append |= {"EIGHTH": power(-(-head_dim // 8)), "GROUPS": 1}
    merge = {"QUANTIZE": True, "SPLITS": 16, "TERMS": len(decode_tiles(layout).blocks), "BLOCK": power(head_dim)}
    for function, constants, out, warps in (
        (kv.append_kernel, append, "*bf16", 1),
        (kv.merge_kernel, merge, "*bf16", 4),
    ):
        types = CACHE | {"out": out}
        kernel = compile_for(function, types, common | constants, {"capacity"}, 90, warps, 3, launch_pdl=True)
        assert waits_first(kernel.asm["ptx"])
        assert kernel.metadata.shared <= SHARED[90] and spilled(kernel, tmp_path) == 0


@heads
@pytest.mark.parametrize("quantize", [False, True])
def test_attending_reads_16_bytes_at_once_converts_nothing_and_spills_nothing(bits, head_dim, quantize, tmp_path):
    layout = KVLayout(head_dim, bits)
    tiles = decode_tiles(layout)
    words = tiles.unit == torch.int32
    constants = {
        "D": head_dim, "row": tiles.row, "FIRST": bits == 3, "QUANTIZE": quantize, "SYMMETRIC": True,
        "TOKENS": tiles.tokens, "STAGES": tiles.stages, "ASM": True, "PDL": True,
    }  # fmt: skip
    if tiles.unit == torch.uint8:
        function, constants["LOW"], constants["HIGH"] = decode_bytes_kernel, *tiles.blocks
    else:
        function, (constants["BLOCK"],) = kv.decode_kernel, tiles.blocks
        constants |= {"THREE": bits == 3, "HALVES": tiles.unit == torch.int16}
    unit = {torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}[tiles.unit]
    types = CACHE | {"k_data": unit, "v_data": unit, "out": "*fp32"}
    kernel = compile_for(function, types, constants, {"capacity"}, 90, tiles.warps, 3, launch_pdl=True)
    # how long a sequence is may still change where it is read to ask for rows: past the first-level cache, and again
    assert waits_first(kernel.asm["ptx"], "ld.global.cg") and asked_ahead(kernel.asm["ptx"]) == 2
    assert kernel.metadata.shared <= SHARED[90] and spilled(kernel, tmp_path) == 0
    if words:
        ptx = kernel.asm["ptx"]
        # a thread has 32 numbers of a row: eight words in three digits of the query, and 32 values
        assert ptx.count("dp4a") == 3 * 8 and ptx.count("prmt.b32") == 32
        copies = re.findall(r"cp\.async\.\w+\.shared\.global .*?(0x\w+|\d+), ", ptx)
        assert copies and all(int(size, 0) == (16 if bits == 4 else 4) for size in copies)
    elif tiles.unit == torch.uint8:
        # as many of the low bits, and of the highest; a byte at a time, each once
        ptx = kernel.asm["ptx"]
        assert ptx.count("dp4a") == 2 * 3 * 8 and ptx.count("prmt.b32") >= 2 * 32
        loads = len(re.findall(r"ld\.global[.\w]*\.[bu]8\b", ptx))
        assert loads == 2 * 4 * tiles.tokens * sum(tiles.blocks) // 32
