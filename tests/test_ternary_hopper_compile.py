"""The product by Hopper's copy engine compiles without a GPU: on the matrix units, nothing spilled."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest

triton = pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from paperlm_kernels.ternary_linear import hopper  # noqa: E402

if not hopper.has_stream():
    pytest.skip("this Triton has no Gluon for Hopper", allow_module_level=True)

from paperlm_kernels.ternary_linear import stream  # noqa: E402
from support_compile import SHARED, compile_for, registers, spilled  # noqa: E402
from test_ternary_compile import SIZES  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

POINTERS = {
    "scale": "*fp32", "rowsum": "*i32", "alpha": "*fp32", "y": "*bf16", "parts": "*i32",
}  # fmt: skip


def all_forms():
    """What is compiled once of the tiles for these matrices and up to 4096 tokens on a card of 132 multiprocessors."""
    tiles = {hopper.stream_tiles_of(M, N, -(-K // 128) * 32, 132)
             for M in (5, 16, 32, 33, 64, 65, 256, 4096) for N, K in SIZES}  # fmt: skip
    forms = [(hopper.constants_of(one, gated), one.warps, "bf16") for one in tiles for gated in (False, True)]
    forms += [(constants, warps, "fp32") for constants, warps, _ in forms if constants["BN"] == 128]
    return [form for i, form in enumerate(forms) if form not in forms[:i]]


def described(*box):
    """The type of bytes that are copied in boxes of so many."""
    return f"tensordesc<i8{[*box]},{stream.swizzled(box[-1], len(box))!r}>"


def compiled(constants, warps, dtype, multiples_of_16):
    columns = 32 * constants["C"]
    types = POINTERS | {"y": f"*{dtype}", "x_desc": described(constants["C"], constants["BM"], 128)}
    types |= {"w_desc": described(constants["HALF"] or constants["BN"], columns)}
    return compile_for(
        stream.stream_kernel, types, constants, multiples_of_16, 90, warps, 3, source_of=GluonASTSource, launch_pdl=True
    )


@pytest.mark.parametrize("constants,warps,dtype", all_forms(), ids=str)
def test_every_form_is_on_the_matrix_units_with_the_weights_in_registers(constants, warps, dtype, tmp_path):
    kernel = compiled(constants, warps, dtype, {"N"})
    ptx = kernel.asm["ptx"]
    products = set(re.findall(r"wgmma\.mma_async\S+", ptx))
    assert products == {f"wgmma.mma_async.sync.aligned.m64n{constants['BM']}k32.s32.s8.s8"}
    assert kernel.metadata.shared <= SHARED[90] // 2 and spilled(kernel, tmp_path) == 0
    # before what another kernel may write is read or written, the end of that kernel is waited for
    wait = ptx.index("griddepcontrol.wait")
    assert wait < ptx.index("griddepcontrol.launch_dependents")
    assert wait < min(ptx.index(access) for access in ("ld.global", "st.global", "wgmma.mma_async"))
    assert not re.search(r"\b(atom|red)\.", ptx[:wait])
    assert re.search(r"st\.global[.\w]*\.v4\.b32", ptx) and not re.search(r"st\.global[.\w]*\.b16\b", ptx)


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_who_adds_up_asks_memory_itself_again_and_again_for_all_sums_at_once(tokens, tmp_path):
    """A number that is there says so: nothing is counted, and what the first-level cache keeps is not looked at."""
    tiles = hopper.stream_tiles_of(tokens, 4096, 2752, 132)
    assert tiles.splits > 1
    shared, alone = (
        compiled(hopper.constants_of(one), tiles.warps, "bf16", {"N"}).asm["ptx"]
        for one in (tiles, dataclasses.replace(tiles, splits=1))
    )
    each, others = tiles.rows * tiles.tokens // (32 * tiles.warps), tiles.splits - 1
    asked = list(re.finditer(r"ld\.volatile\.global(?:\.v(\d))?\.b32", shared))
    assert sum(int(one[1] or 1) for one in asked) == others * each
    assert not re.search(r"\b(atom|red)\.", shared) and "membar" not in shared and "fence.acq_rel" not in shared
    labels = {name[1]: name.start() for name in re.finditer(r"^(\$\w+):", shared, re.M)}
    behind = re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+)", shared[asked[-1].end() :])
    assert any(labels[one[1]] < asked[0].start() for one in behind), "it goes back to the first of them"
    with_parts, without = (
        sum(int(wide or 1) for wide in re.findall(r"st\.global(?:\.v(\d))?\.b32", ptx)) for ptx in (shared, alone)
    )
    assert with_parts - without == (others + 1) * each, "its own sums, and zeros where the others' were"


@pytest.mark.parametrize("gated", [False, True])
def test_three_programs_of_many_tokens_find_room_on_a_multiprocessor(gated, tmp_path):
    """With 182 registers a thread, as scales asked for early need, there were two, and 7B's qkv took a fifth longer."""
    tiles = hopper.stream_tiles_of(256, 12288, 1024, 132)
    kernel = compiled(hopper.constants_of(tiles, gated), tiles.warps, "bf16", {"N"})
    given = -(-registers(kernel, tmp_path) // 8) * 8  # a thread's, which are given by eights
    assert 3 * 32 * tiles.warps * given <= 65536 and 3 * (kernel.metadata.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("rows,columns", [(3200, 8640), (4096, 11008), (4096, 4096), (3200, 3200), (2048, 5460),
                                          (3072, 11008), (3584, 9728), (2048, 14336), (1024, 8192)])  # fmt: skip
def test_all_programs_of_a_product_of_few_rows_find_room_beside_those_of_the_one_in_front(rows, columns, tmp_path):
    """They read their weights early. 3200 x 8640 by programs of which half had to wait took a tenth longer."""
    tiles = hopper.stream_tiles_of(16, rows, -(-columns // 128) * 32, 132)
    kernel = compiled(hopper.constants_of(tiles), tiles.warps, "bf16", {"N"})
    given = -(-registers(kernel, tmp_path) // 8) * 8
    at_once = min(65536 // (32 * tiles.warps * given), 228 * 1024 // (kernel.metadata.shared + 1024))
    assert 2 * -(-rows // 64) * tiles.splits <= 132 * at_once


def test_few_tokens_have_their_scales_before_the_first_product():
    tiles = hopper.stream_tiles_of(16, 12288, 1024, 132)
    ptx = compiled(hopper.constants_of(tiles), tiles.warps, "bf16", {"N"}).asm["ptx"]
    loads = [at.start() for at in re.finditer(r"\bld\.global", ptx)]
    assert loads and max(loads) < ptx.index("wgmma.mma_async")


@pytest.mark.parametrize("gated,width", [(False, 4), (True, 2)])
def test_rows_that_are_multiples_of_8_and_not_of_16_are_stored_together_too(gated, width):
    """10,920 rows, as 1.3B has: by ones they took longer than cuBLAS."""
    tiles = hopper.stream_tiles_of(4096, 10920, 512, 132)
    stores = {
        eight: set(re.findall(r"st\.global[.\w]*", compiled(
            hopper.constants_of(tiles, gated, eight), tiles.warps, "bf16", set()
        ).asm["ptx"]))
        for eight in (True, False)
    }  # fmt: skip
    assert all(f".v{width}.b32" in store for store in stores[True])
    assert any(store.endswith(".b16") for store in stores[False])
