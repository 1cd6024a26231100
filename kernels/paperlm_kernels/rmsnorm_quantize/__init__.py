"""RMSNorm, TopK and a quantizer of activations in one pass (BitNet a4.8, arXiv 2411.04965).

One direction of imports: `modes` -> `reference` and `kernel` -> `launch` -> `ops` -> `function` -> users.
"""

from paperlm_kernels.rmsnorm_quantize.function import (
    Quantized,
    rmsnorm_fake_quantize,
    rmsnorm_quantize,
    rmsnorm_training_input,
)
from paperlm_kernels.rmsnorm_quantize.modes import MODES

__all__ = ["MODES", "Quantized", "rmsnorm_fake_quantize", "rmsnorm_quantize", "rmsnorm_training_input"]
