"""Models whose weights lie compressed between their uses, and their training without optimizer state: NeuZip.

    from functools import partial
    from paperlm_kernels.stored import LomoSgd, PackedStore, convert

    convert(model.bfloat16(), PackedStore)                          # its linear layers: about 10.7 bits a weight
    model.gradient_checkpointing_enable({"use_reentrant": False})   # activations are recomputed
    optimizer = LomoSgd(model, lr=0.1)
    model(**batch).loss.backward()                                  # updates each weight as its gradient arrives
    optimizer.step()

    convert(model, partial(PackedStore, mant_bits=3, block_norm=512))   # after training, rounded: about 7 bits

A layer's weight is decoded when the layer runs and dropped behind it. Training is that of plain weights bit for bit
where a run repeats itself so (on a GPU, with PyTorch's deterministic kernels): `convert(model, RawStore)` runs the same
operators on the same values. Checkpoints are `model.state_dict()`, the plain
values under the plain names, or `save_packed`, the containers. With `load_state_dict` either goes into a plain model.

Hao, Cao, Mou: NeuZip: Memory-Efficient Training and Inference with Dynamic Compression of Neural Networks, arXiv
2410.20650.
"""

from paperlm_kernels.stored.convert import POLICIES, Conversion, chosen_weights, convert
from paperlm_kernels.stored.files import read_packed, save_packed
from paperlm_kernels.stored.layers import (
    StoredConv1D,
    StoredEmbedding,
    StoredLinear,
    named_plain_tensors,
    plain_tensors,
    stored_weights,
)
from paperlm_kernels.stored.lomo import LomoSgd, sgd_update
from paperlm_kernels.stored.report import WeightBytes, model_hash, weight_bytes, weight_hashes
from paperlm_kernels.stored.stores import Int8Store, Nf4Store, PackedStore, RawStore, RowBlocks, WeightStore
from paperlm_kernels.stored.weight import StoredWeight

__all__ = [
    "POLICIES", "Conversion", "Int8Store", "LomoSgd", "Nf4Store", "PackedStore", "RawStore", "RowBlocks",
    "StoredConv1D", "StoredEmbedding", "StoredLinear", "StoredWeight", "WeightBytes", "WeightStore", "chosen_weights",
    "convert", "model_hash", "named_plain_tensors", "plain_tensors", "read_packed", "save_packed", "sgd_update",
    "stored_weights", "weight_bytes", "weight_hashes",
]  # fmt: skip
