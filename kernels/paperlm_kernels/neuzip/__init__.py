"""Weights in fewer bits, with and without loss (NeuZip, arXiv 2410.20650).

    packed = pack(weight)             # 10.7 bits for a bfloat16 weight, on the device where it is
    weight = packed.unpack()          # the same bits
    packed.update_(weight - lr * grad)

`fields`, `codebook`, `streams` and `reference` are the definition, in NumPy; `header` and `container` the bytes on a
disk; `record` the tensors; the kernels are tested for the definition's bytes.
"""

from paperlm_kernels.neuzip.entropy import EntropyReport, entropy_report
from paperlm_kernels.neuzip.errors import ContainerError
from paperlm_kernels.neuzip.record import Packed, from_bytes, pack

__all__ = ["ContainerError", "EntropyReport", "Packed", "entropy_report", "from_bytes", "pack", "raise_decode_errors"]


def raise_decode_errors(device: object) -> None:
    """Raises StreamError if a stream that was unpacked on this device since the last call ended where it should not.

    On a GPU it waits for the device: call it once a step. On a CPU `unpack` raises at once.
    """
    from paperlm_kernels.neuzip.decode_errors import raise_found

    raise_found(device)
