"""The kernels as a package of their own, as somebody installs them who trains with something else."""

from __future__ import annotations

import shutil
import subprocess
import sys

from paperlm.plan.project import ROOT

USE = """
import sys
sys.path[:] = [sys.argv[1], *(p for p in sys.path if p not in sys.argv[2:])]
import torch, paperlm_kernels
loss = paperlm_kernels.linear_cross_entropy(
    torch.ones(3, 8, requires_grad=True), torch.ones(5, 8), torch.tensor([0, 4, 2]))
loss.backward()
layer = paperlm_kernels.TernaryLinear.from_linear(torch.nn.Linear(8, 4, bias=False))
assert layer(torch.ones(2, 8)).shape == (2, 4)
from paperlm_kernels.stored import LomoSgd, PackedStore, convert
model = torch.nn.Sequential(torch.nn.Linear(128, 256)).bfloat16()
assert convert(model, PackedStore).bits_per_weight < 12 + 8 * 17_664 / (128 * 256)  # the codebook's tables
LomoSgd(model, 0.1)
model(torch.ones(3, 128).bfloat16()).sum().backward()
from paperlm_kernels.neuzip import pack
assert pack(torch.ones(2**15).bfloat16()).unpack().sum() == 2**15
print(paperlm_kernels.__file__, round(loss.item(), 4), {"paperlm", "transformers"} & set(sys.modules))
"""


def test_the_kernels_install_and_run_without_the_rest(tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__", "build"))
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", site, tmp_path / "kernels"], check=True)
    mine = [str(ROOT / "src"), str(ROOT / "kernels")]
    ran = subprocess.run(
        [sys.executable, "-I", "-c", USE, site, *mine], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert ran.stdout.split() == [str(site / "paperlm_kernels/__init__.py"), "1.6094", "set()"]
    assert (site / "paperlm_kernels-0.1.0.dist-info/licenses/LICENSE").read_text() == (ROOT / "LICENSE").read_text()
