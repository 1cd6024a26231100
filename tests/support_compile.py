"""Helpers of the tests that compile kernels for a card which is not there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {90: 232448, 80: 101376}
"Bytes of shared memory of a program: H100; for Ampere the smallest of the family, 99 KiB."


def compile_for(kernel, types, constants, aligned, architecture, warps, stages, source_of=ASTSource, **more):
    """The kernel with pointers and numbers of these types (32-bit integers unless they are named); all pointers and the
    integers in `aligned` are multiples of 16. source_of: GluonASTSource for a kernel of Gluon. more: of the compiler's
    options."""
    names = kernel.arg_names
    source = source_of(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n not in constants and (types.get(n, "").startswith("*") or n in aligned)
        },
    )
    options = {"num_warps": warps, "num_stages": stages, **more}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def assembled(kernel, tmp_path):
    """What the assembler that Triton ships says of it; it must not say that wgmma is serialized."""
    (tmp_path / "k.ptx").write_text(kernel.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [ptxas, "-v", "-arch=sm_90a", tmp_path / "k.ptx", "-o", tmp_path / "k.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in said
    return said


def spilled(kernel, tmp_path):
    """Bytes that the assembler spills."""
    return int(re.search(r"(\d+) bytes spill stores", assembled(kernel, tmp_path))[1])


def registers(kernel, tmp_path):
    """Of a thread."""
    return int(re.search(r"Used (\d+) registers", assembled(kernel, tmp_path))[1])


def spare_buffers(kernel):
    """Of the buffers of each block that asynchronous products read, those not filled ahead, the fewest: a product still
    reads one while the next copy is made, so with none it reads what is overwritten."""
    buffers, filled, place, spare, single = {}, {}, {}, [], False
    for line in kernel.asm["ttgir"].splitlines():  # in order, for names return in later regions
        if found := re.search(r"(%\w+) = ttg\.local_alloc .*memdesc<(\d+)x\d+x\d+x", line):
            buffers[found[1]], filled[found[1]] = int(found[2]), 0
        elif found := re.search(r"(%\w+) = ttg\.memdesc_index (%\w+)\[(%\w+)\]", line):
            place[found[1]] = found[2], found[3].startswith("%c")
        elif found := re.search(r"(%\w+) = ttg\.memdesc_trans (%\w+)", line):
            place[found[1]] = place.get(found[2])
        elif found := re.search(r"async_copy_global_to_local %\w+, (%\w+)", line) or re.search(
            r"async_tma_copy_global_to_local .*\] (%\w+),", line
        ):
            block, ahead = place[found[1]]
            if block in filled and ahead:
                filled[block] += 1
        elif "warp_group_dot " in line and "isAsync = true" in line:
            for name in re.search(r"warp_group_dot (%\w+), (%\w+)", line).groups():
                block, _ = place.get(name) or (None, False)
                if block in filled:
                    spare.append(buffers[block] - filled[block])
                else:
                    single = True  # one buffer, written from registers
        elif "warp_group_dot_wait" in line and single:
            assert "pendings = 0" in line
            single = False
    return min(spare)  # an error if nothing was found, which is not the same as nothing wrong


def waits_first(ptx, *before):
    """Whether the end of the kernel in front is waited for before memory is touched and the next kernel let in, but for
    what may come `before`, each once. To ask for lines of the L2 cache touches nothing."""
    ptx = ptx.replace("cp.async.bulk.prefetch.L2", "")
    for allowed in before:
        assert 0 < ptx.find(allowed) < ptx.index("griddepcontrol.wait")
        ptx = ptx.replace(allowed, "", 1)
    accesses = ("griddepcontrol.launch", "ld.global", "st.global", "cp.async", "atom.", "red.", "prefetch")
    touched = [ptx.find(access) for access in accesses]
    return 0 < ptx.index("griddepcontrol.wait") < min(at for at in touched if at > 0)
