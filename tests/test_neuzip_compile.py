"""The kernels of packed weights compile for Hopper and Ampere without a GPU: wide accesses, no spilled registers."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import torch  # noqa: E402
from paperlm_kernels.neuzip import (  # noqa: E402
    kernel_codebook,
    kernel_decode,
    kernel_encode,
    kernel_gemv,
    kernel_pairs,
    kernel_product,
    launch,
    launch_encode,
    pack,
)
from paperlm_kernels.neuzip.codebook import PALETTE  # noqa: E402
from paperlm_kernels.neuzip.geometry import PROFILES  # noqa: E402
from paperlm_kernels.neuzip.launch import WIDTH  # noqa: E402
from paperlm_kernels.neuzip.launcher import WARPS  # noqa: E402
from paperlm_kernels.neuzip.product import REGISTERS, gemv_registers  # noqa: E402
from support_compile import compile_for, registers, spilled, waits_first  # noqa: E402

both = pytest.mark.parametrize("architecture", [90, 80])
OCTET = {7: "*i64", 3: "*i32", 1: "*i16", 0: "*u8"}
POINTERS = dict.fromkeys(
    ("payload", "directory", "table", "patches", "patch_directory", "found", "most", "sums", "note", "host",
     "packing", "pairs", "decoding", "left", "escaping"), "*i32",
) | dict.fromkeys(("units", "norm", "plane8", "index", "stored"), "*u8") | {
    "out": "*i16", "weights": "*i16", "counts": "*i64"
}  # fmt: skip


def compiled(kernel, architecture, k, log_norm, profile="default", aligned=True, warps=WARPS, maxnreg=None, **more):
    """Compiled as a launch compiles it: no number is known to be a multiple of anything."""
    g = PROFILES[profile]
    known = {
        "OCTETS": g.octets, "LANES": g.lanes, "LIMIT": g.limit, "GUARD": g.guard, "UNIT": g.unit, "K": k,
        "LOG_NORM": log_norm, "ALIGNED": aligned, "WIDTH": WIDTH, "CHECK": True, "N": 512, "FIRST_WARP": True,
        "STREAMS": True, "PALETTE": PALETTE, "PART": 1024, "CODES": 256, "NOTED": 64,
        "SCAN": 1024, "STEP": 4096, "MOST": 255, "PDL": architecture == 90,
    }  # fmt: skip
    constants = {name: value for name, value in known.items() if name in kernel.arg_names}
    types = {**POINTERS, "plane": OCTET[k], **more}
    return compile_for(
        kernel, types, constants, set(), architecture, warps, 3, launch_pdl=constants.get("PDL", False),
        **({"maxnreg": maxnreg} if maxnreg else {}),
    )  # fmt: skip


@both
@pytest.mark.parametrize("profile", ["default", "dense", "fast"])
@pytest.mark.parametrize("k,log_norm", [(7, 0), (3, 9), (1, 0), (0, 9)])
def test_decoding_stores_16_bytes_a_lane_and_spills_nothing(architecture, profile, k, log_norm, tmp_path):
    kernel = compiled(kernel_decode.decode_kernel, architecture, k, log_norm, profile)
    ptx = kernel.asm["ptx"]
    assert re.search(r"st\.global\.v4\.b32", ptx)
    assert k != 7 or re.search(r"ld\.global\.b64", ptx)
    assert kernel.metadata.shared <= 1024  # of the one sum across lanes
    if architecture == 90:
        assert spilled(kernel, tmp_path) == 0
        assert waits_first(ptx)


def test_two_normed_weights_are_rounded_at_once_the_second_into_the_upper_half(tmp_path):
    """By integers it took 31 instructions more a lane and step, and registers of which 12 programs found room, not 16.

    A word's first weight, which is its lower half, is shifted up to be a float32; the second stands there already.
    """
    kernel = compiled(kernel_decode.decode_kernel, 90, 3, 9)
    ptx = kernel.asm["ptx"]
    made = {found[1]: found[0].strip() for found in re.finditer(r"^\s*[a-z][\w.]+\s+(%\w+), .*;", ptx, re.M)}
    pairs = re.findall(r"cvt\.rn\.bf16x2\.f32 %\w+, (%\w+), (%\w+);", ptx)
    assert len(pairs) == 4  # an octet

    def is_shifted(product):
        factors = re.fullmatch(r"mul\.f32\s+%\w+, (%\w+), (%\w+);", made[product]).groups()
        return any(re.fullmatch(r"shl\.b32\s+%\w+, %\w+, 16;", made[factor]) for factor in factors)

    assert [(is_shifted(upper), is_shifted(lower)) for upper, lower in pairs] == [(False, True)] * 4
    assert 2048 * -(-registers(kernel, tmp_path) // 8) * 8 <= 65536, "so many threads run at once"


@both
@pytest.mark.parametrize("k,log_norm", [(7, 0), (3, 9), (0, 0)])
def test_decoding_four_bits_stores_16_bytes_a_lane(architecture, k, log_norm, tmp_path):
    kernel = compiled(kernel_decode.decode_fix4_kernel, architecture, k, log_norm, "fix4", warps=WIDTH // 32)
    assert re.search(r"st\.global\.v4\.b32", kernel.asm["ptx"])
    if architecture == 90:
        assert spilled(kernel, tmp_path) == 0
        assert waits_first(kernel.asm["ptx"])


@both
@pytest.mark.parametrize("k,log_norm", [(7, 0), (3, 9), (0, 0)])
@pytest.mark.parametrize("name", ["size", "write", "fix4", "patch"])
def test_encoding_reads_16_bytes_a_lane_and_spills_nothing(architecture, name, k, log_norm, tmp_path):
    kernel = getattr(kernel_encode, f"{name}_kernel")
    kernel = compiled(kernel, architecture, k, log_norm, lowest="*u8")
    assert name == "patch" or re.search(r"ld\.global\.v4\.b32", kernel.asm["ptx"])
    if architecture == 90:
        assert spilled(kernel, tmp_path) == 0


@both
@pytest.mark.parametrize("k,log_norm", [(7, 0), (3, 9), (0, 0)])
def test_counting_reads_16_bytes_a_lane_and_spills_nothing(architecture, k, log_norm, tmp_path):
    kernel = compiled(kernel_codebook.count_kernel, architecture, k, log_norm, maxnreg=launch_encode.REGISTERS)
    assert re.search(r"ld\.global\.v4\.b32", kernel.asm["ptx"])
    if architecture == 90:
        assert spilled(kernel, tmp_path) == 0


@both
def test_what_one_program_does_for_all_compiles_and_spills_nothing(architecture, tmp_path):
    scan = compiled(kernel_encode.scan_kernel, architecture, 7, 0, warps=8)
    codebook = compiled(kernel_codebook.codebook_kernel, architecture, 7, 0)
    lowest = compiled(kernel_codebook.lowest_kernel, architecture, 7, 0, lowest="*u8")
    pairs = compiled(kernel_pairs.pairs_kernel, architecture, 7, 0)
    # straight-line code of all of its loops would have ten times the instructions, each of which is fetched
    assert len(codebook.asm["cubin"]) < 120_000
    if architecture == 90:
        assert [spilled(kernel, tmp_path) for kernel in (scan, codebook, lowest, pairs)] == [0] * 4


@pytest.mark.parametrize("count", [1032, 1031])
@pytest.mark.parametrize("profile", ["default", "fix4"])
def test_a_count_that_is_no_multiple_of_eight_is_stored_in_16_bytes_too(monkeypatch, profile, count):
    kernel = (launch._FIX4 if profile == "fix4" else launch._STREAMS).kernel
    given = {}
    monkeypatch.setattr(launch.Starts, "run", lambda starts, *rest: given.update(starts.constants))
    packed = pack(torch.ones(count, dtype=torch.bfloat16), profile=profile, raw="never", backend="reference")
    launch.run_decode(packed, torch.empty(count, dtype=torch.bfloat16), check=True)
    types = {**POINTERS, "plane": OCTET[7]}
    warps = WIDTH // 32 if profile == "fix4" else WARPS
    constants = {name: value for name, value in given.items() if name in kernel.arg_names}
    ptx = compile_for(kernel, types, constants, set(), 90, warps, 3).asm["ptx"]
    assert_wide(ptx, "st", 2 if profile == "fix4" else 1)


@pytest.mark.parametrize("count", [1032, 1031])
@pytest.mark.parametrize("name,accesses", [("size", 3), ("write", 5), ("fix4", 3), ("count", 7)])
def test_a_count_that_is_no_multiple_of_eight_is_loaded_in_16_bytes_too(name, accesses, count):
    t = torch.ones(count, dtype=torch.bfloat16)
    header = pack(t, raw="never", backend="reference").header
    constants = launch_encode.Job(t, header).plan.starts.constants
    kernel = getattr(kernel_codebook if name == "count" else kernel_encode, f"{name}_kernel")
    ptx = compiled(kernel, 90, 7, 0, aligned=constants["ALIGNED"], lowest="*u8").asm["ptx"]
    assert_wide(ptx, "ld", accesses)


def assert_wide(ptx, access, number):
    """So many accesses of 16 bytes, and none of 2 in the blocks of code that have them: the last few weights, one by
    one, are elsewhere."""
    wide, found = rf"{access}\.global\S*\.v4\.b32", 0
    for block in ptx.split("$L__BB"):
        found += len(re.findall(wide, block))
        assert not (re.search(wide, block) and re.search(rf"{access}\.global\S*\.b16", block))
    assert found == number


@both
def test_views_that_begin_anywhere_and_normalizers_compile(architecture):
    for k in (7, 3, 1, 0):
        compiled(kernel_decode.decode_kernel, architecture, k, 0, aligned=False)
        compiled(kernel_encode.write_kernel, architecture, k, 0, aligned=False)
        compiled(kernel_encode.size_kernel, architecture, k, 0, aligned=False)
    compiled(kernel_encode.normalizer_kernel, architecture, 3, 0)


@both
@pytest.mark.parametrize("tokens,rows", [(1, 4), (8, 4), (16, 2)])
def test_the_product_with_four_bit_exponents_compiles_and_spills_nothing(architecture, tokens, rows, tmp_path):
    constants = {"M": tokens, "ROWS": rows, "STEP": 128, "BLOCK": PROFILES["fix4"].block, "PATCHES": 32}
    types = {**POINTERS, "x": "*i64", "plane": "*i64", "y": "*i16"}
    kernel = compile_for(
        kernel_product.fix4_product_kernel, types, constants, {"rows", "columns"}, architecture, WARPS, 3
    )  # fmt: skip
    if architecture == 90:
        assert spilled(kernel, tmp_path) == 0


@both
@pytest.mark.parametrize("warps,more,even", [(2, 1, True), (4, 1, True), (4, 2, False), (8, 2, True), (16, 1, False)])
def test_the_product_on_tensor_cores_compiles_and_spills_nothing(architecture, warps, more, even, tmp_path):
    pdl = architecture == 90
    constants = {"W": warps, "NT": more, "EVEN": even, "BLOCK": PROFILES["fix4"].block, "PDL": pdl}
    types = {**POINTERS, "x": "*i32", "plane": "*u8", "y": "*i16"}
    kernel = compile_for(
        kernel_gemv.fix4_gemv_kernel, types, constants, set(), architecture, warps, 3,
        maxnreg=gemv_registers(constants), launch_pdl=pdl,
    )  # fmt: skip
    ptx = kernel.asm["ptx"]
    # by 16 bytes are loaded weights, the next ones and values; nothing but the last sum crosses threads
    assert len(re.findall(r"ld\.global\.nc\S*\.v4\.b32", ptx)) == 12 + 4 * more
    assert len(re.findall("shfl", ptx)) <= 64 and kernel.metadata.shared <= 8192
    if architecture == 90:
        assert spilled(kernel, tmp_path) <= (0 if even else 8)  # before the loop
        assert waits_first(ptx)


@both
@pytest.mark.parametrize("profile", ["default", "dense", "fast"])
@pytest.mark.parametrize("run,tokens", [(1, 1), (1, 2), (1, 4), (4, 1), (8, 2), (8, 4)])
def test_the_product_with_prefix_codes_compiles_and_spills_nothing(architecture, profile, run, tokens, tmp_path):
    g = PROFILES[profile]
    constants = {
        "OCTETS": g.octets, "LANES": g.lanes, "LIMIT": g.limit, "UNIT": g.unit, "RUN": run, "M": tokens, "PATCHES": 32,
    }  # fmt: skip
    types = {**POINTERS, "x": "*i64", "plane": "*i64", "partial": "*fp32"}
    kernel = compile_for(
        kernel_product.stream_product_kernel, types, constants, set(), architecture, WARPS, 3, maxnreg=REGISTERS[tokens]
    )  # fmt: skip
    if architecture == 90:
        assert spilled(kernel, tmp_path) == 0
