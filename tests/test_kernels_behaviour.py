"""The behaviour of the fused losses: every loss has a number, and reading it imports no PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import paperlm_kernels
import pytest
from paperlm_kernels.behaviour import BITNET, CROSS_ENTROPY, loss_behaviour
from paperlm_kernels.cross_entropy.options import PRESETS

from paperlm.models.losses import FUSED


def test_every_fused_loss_of_a_run_has_a_behaviour_and_filtered_ones_that_of_the_filter():
    assert CROSS_ENTROPY.keys() == FUSED.keys()
    for name, keywords in FUSED.items():
        filtered = PRESETS[keywords["preset"]]["filter_eps"] is not None
        assert loss_behaviour(name) == (3 if filtered else 2)


def test_every_operation_for_models_in_few_bits_has_a_behaviour():
    folders = {path.parent.name for path in Path(paperlm_kernels.__file__).parent.glob("*/function.py")}
    folders |= {path.parent.name for path in Path(paperlm_kernels.__file__).parent.glob("*/cache.py")}
    assert BITNET.keys() == folders - {"cross_entropy"}


def test_an_unknown_loss_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="'cce_kahn'; did you mean 'cce_kahan'"):
        loss_behaviour("cce_kahn")


def test_reading_a_behaviour_imports_neither_torch_nor_transformers():
    code = (
        "import sys, paperlm_kernels; from paperlm_kernels.behaviour import loss_behaviour;"
        "assert {'linear_cross_entropy', 'use_fused_loss'} <= set(dir(paperlm_kernels));"
        "print({'torch', 'triton', 'transformers'} & sys.modules.keys() or 'none')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(paperlm_kernels.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "none"
