"""What can be measured, by name. Free of torch, so that names can be checked before anything is measured."""

from __future__ import annotations

import dataclasses

BANDWIDTH = 4.26e12
"Bytes a second that a large copy reads and writes on an H200."


@dataclasses.dataclass(frozen=True)
class Case:
    """A tensor of so many weights: normally distributed with standard deviation 0.02, Student's t times 0.02, or of a
    file."""

    name: str
    about: str
    weights: int
    degrees: int | None = None
    "of freedom of Student's t, which has longer tails; None: normal"

    def floor(self, bits: float, bandwidth: float = BANDWIDTH) -> float:
        """Microseconds that no decoding from so many bits a weight undercuts: what is read and written."""
        return 1e6 * self.weights * (bits / 8 + 2) / bandwidth

    def product_floor(self, bits: float, bandwidth: float = BANDWIDTH) -> float:
        """Microseconds that no product with so many bits a weight undercuts: the packed weights alone are read, and no
        weight is written."""
        return 1e6 * self.weights * bits / 8 / bandwidth

    def listed(self) -> str:
        """One line about it."""
        return (
            f"{self.about}: {self.weights:,} weights; decoding takes at least {self.floor(10.69):.3g} us from 10.69 "
            f"bits, {self.floor(12):.3g} from 12 (H200)"
        )

    def small(self) -> Case:
        """An eighth: to try out the benchmark, not to report."""
        return dataclasses.replace(self, weights=max(2**16, self.weights // 8))


_FIGURE = [Case(f"figure4_{i:02d}", "Figure 4", round(10 ** (5 + i / 4) / 2)) for i in range(13)]
"Matrices of 1e5 to 1e8 bytes."
_POWERS = [Case(f"w2e{power}", f"2^{power}", 2**power) for power in (24, 26, 27, 29)]
_ON_CPU = [Case("cpu_w2e20", "a CPU's size", 2**20)]
STUDENT_T = Case("student_t", "Student's t, with exponents near those of a trained model", 2**24, degrees=5)
CHECKPOINT = Case("checkpoint", "of a trained model (--weights)", 2**24)
CASES = {case.name: case for case in (*_POWERS, *_FIGURE, *_ON_CPU, STUDENT_T, CHECKPOINT)}
GROUPS = {
    "figure4": tuple(case.name for case in _FIGURE),
    "large": tuple(case.name for case in _POWERS),
    "all": tuple(case.name for case in (*_POWERS, *_FIGURE)),
    "cpu": tuple(case.name for case in _ON_CPU),
    "distributions": ("w2e24", STUDENT_T.name),
    "trained": (CHECKPOINT.name,),
}
"""Those of the paper's Figure 4, powers of two, both together for a GPU, that of a CPU, normal weights beside as many
of Student's t, and that of a model's weights."""


ROUNDED = {
    f"ours_{profile}_k{bits}": f"'{profile}' with {said}, normalized in blocks of 512"
    for profile in ("dense", "fast", "fix4")
    for bits, said in ((3, "3 mantissa bits"), (1, "1 mantissa bit"), (0, "no mantissa bit"))
}
"Every other profile with loss; on a GPU they are measured where they are named."
METHODS = {
    "ours": "without loss, the profile 'default'",
    "ours_dense": "the profile 'dense'",
    "ours_fast": "the profile 'fast'",
    "ours_fix4": "exponents in four bits",
    "ours_k3": "3 mantissa bits, normalized in blocks of 512",
    "ours_k1": "1 mantissa bit, normalized in blocks of 512",
    "ours_k0": "no mantissa bit, normalized in blocks of 512",
    **ROUNDED,
    "copy": "PyTorch's copy on the device: the floor",
    "offload pinned": "to the memory of the host, page-locked, and back",
    "offload pageable": "to the memory of the host and back",
    "bitsandbytes nf4": "NF4, blocks of 64; with loss",
    "nvidia-nvcomp-cu12": "exponents by its ANS in chunks of 64 KiB, merged by us: NeuZip as published",
    "nvidia-nvcomp-cu13": "the same, for CUDA 13",
    "dfloat11": "Huffman codes of exponents, decoded by its kernel",
    "splitzip": "the 16 most frequent exponents in four bits, made for caches of keys and values; its codec_gpu.py",
    "zipnn": "bytes apart by their place in a number, then compressed, on a CPU",
    "rans": "exponents by our reference of an asymmetric numeral system, in chunks of 64 KiB, on a CPU; bits alone",
}
"Method -> what it is."
METRICS = {
    "time": {"measure": ("decode", "encode", "update", "gemv", "gemv2", "gemv4", "gemv8", "gemv16")},
    "throughput": {"measure": ("pack_file", "unpack_file")},
    "bits": {},
    "error": {},
    "determinism": {},
}
"Metric of a row -> what tells its rows apart, and the values that has."
