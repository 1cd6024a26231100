"""Where the weight of a layer lies between its uses: as it is, packed without loss or with, in NF4, in blocks of rows.

Every store has the same few methods, so that layers, optimizer and checkpoints know none of them by name. A store of
one's own needs `read`, `write`, `nbytes` and `apply`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paperlm_kernels.neuzip import Packed

StoreFactory = Callable[[Tensor], "WeightStore"]
"Makes the store of a weight from its values: RawStore, PackedStore, functools.partial(PackedStore, mant_bits=3)."


def runs_ahead(device: torch.device) -> bool:
    """Whether the host goes on while a device works, so that waiting for it would keep both from working."""
    return device.type != "cpu"


class WeightStore:
    """One weight. `read` gives its values, contiguous and of `shape`, `dtype` and `device`; nobody writes into them."""

    trainable: ClassVar[bool] = True
    "whether `write` keeps values as they are; a store that rounds cannot be trained"
    multiplies: ClassVar[bool] = False
    "whether `product` takes the place of a product with `read`"

    def __init__(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            raise ValueError("a weight on the meta device has no values; load the checkpoint before it is stored")
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def read(self) -> Tensor:
        """The values."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b of x (rows, in) and a weight (out, in), of a store that `multiplies`."""
        raise NotImplementedError

    def take(self, read: Tensor | None = None) -> Tensor:
        """The values, for somebody who changes them in place and gives them to `write`, so that no second copy is
        needed. read: what `read` gave since they were written, if nobody else needs that any more."""
        return (self.read() if read is None else read).clone()

    def write(self, tensor: Tensor) -> None:
        """Take these values. The old ones stay until the new ones are there, of `RowBlocks` those of each block."""
        raise NotImplementedError

    def write_later(self, tensor: Tensor) -> None:
        """`write`, of values that nobody changes any more; it may end when the store is used next, or at `settle`."""
        self.write(tensor)

    def settle(self) -> None:
        """End what `write_later` began."""

    @property
    def nbytes(self) -> int:
        """Bytes that lie there between uses, tables included."""
        raise NotImplementedError

    def renew(self) -> None:
        """Make what follows from the values' history anew from the values, where there is such a thing."""

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """What `nn.Module.to` and its like do to a tensor: another device, and for some stores another dtype."""
        raise NotImplementedError

    def _check(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous. Raises ValueError for other sizes, TypeError for another dtype."""
        if tensor.shape != self.shape:
            raise ValueError(f"values of shape {tuple(tensor.shape)} for a weight of {tuple(self.shape)}")
        if tensor.dtype != self.dtype:
            raise TypeError(f"values of {tensor.dtype} for a weight of {self.dtype}; convert them first")
        return tensor.detach().to(self.device).contiguous()

    def _same_dtype(self, fn: Callable[[Tensor], Tensor]) -> torch.device:
        """The device that `fn` moves to. Raises TypeError if it changes the dtype."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if probe.dtype != self.dtype:
            raise TypeError(
                f"weights in a {type(self).__name__} stay {self.dtype}; bring the model to {probe.dtype} before "
                "convert(), or load its state dict into a plain model. What stands in front of them in the model is "
                f"{probe.dtype} now: model.to({self.dtype}) brings it back"
            )
        return probe.device


class RawStore(WeightStore):
    """The values as they are, of any dtype: the baseline, and what a weight that is not bfloat16 is kept in."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor.detach().contiguous().clone()

    def read(self) -> Tensor:
        return self.tensor

    def take(self, read: Tensor | None = None) -> Tensor:
        return self.tensor

    def write(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor is self.tensor else self._check(tensor).clone()

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.tensor = fn(self.tensor).contiguous()
        self.dtype, self.device = self.tensor.dtype, self.tensor.device


class PackedStore(WeightStore):
    """Exponents entropy-coded, sign and mantissa beside them (paperlm_kernels.neuzip). `options` are those of `pack`.

    With mant_bits=7, the default, every bit comes back and the weight can be trained; fewer round the mantissa, for
    use after training. Raises TypeError for another dtype than bfloat16: store such weights raw.

    Source: NeuZip, arXiv 2410.20650, sections 3.1 to 3.3.
    """

    def __init__(self, tensor: Tensor, **options: Any) -> None:
        super().__init__(tensor)
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"packed weights are bfloat16, not {tensor.dtype}; call model.bfloat16() before convert()")
        from paperlm_kernels.neuzip import pack

        self.options = options
        self.trainable = options.get("mant_bits", 7) == 7  # over the class's, for this store alone
        self._packed = pack(tensor.detach().contiguous(), **options)
        self._finish: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__

    @property
    def packed(self) -> Packed:
        """The weight; what was begun is ended first."""
        self.settle()
        return self._packed

    def read(self) -> Tensor:
        return self.packed.unpack()

    def take(self, read: Tensor | None = None) -> Tensor:
        return self.read() if read is None else read  # decoded for the caller alone

    def write(self, tensor: Tensor) -> None:
        self.packed.update_(self._check(tensor))  # with the codebook that is there, as long as it fits

    def write_later(self, tensor: Tensor) -> None:
        if not runs_ahead(self.device):
            return self.write(tensor)
        self._finish = self.packed.update_later(self._check(tensor))

    def settle(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None  # a refused write leaves what was there, and no second try
            finish()

    def renew(self) -> None:
        """Pack anew with a codebook of the values as they are now: the bytes then follow from the values alone, and not
        from the updates before."""
        from paperlm_kernels.neuzip import pack

        pack(self.read(), **self.options, out=self.packed)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        if (device := self._same_dtype(fn)) != self.device:
            self._packed, self.device = self.packed.to(device), device


class Nf4Store(WeightStore):
    """bitsandbytes' NF4 in blocks of 64, for comparison: rounded, so not for training. Needs that package.

    double: the blocks' scales are quantized as well. quant_type: "nf4", or "fp4".
    """

    trainable = False

    def __init__(self, tensor: Tensor, double: bool = False, quant_type: str = "nf4") -> None:
        try:
            from bitsandbytes.functional import quantize_4bit
        except ImportError:
            raise ImportError("Nf4Store needs bitsandbytes, which is not installed: pip install bitsandbytes") from None
        super().__init__(tensor)
        self.double, self.quant_type = double, quant_type
        options = {"quant_type": quant_type, "compress_statistics": double}
        self.codes, self.state = quantize_4bit(tensor.detach().contiguous(), **options)

    def read(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.codes, self.state).to(self.dtype)

    def write(self, tensor: Tensor) -> None:
        self.__init__(self._check(tensor), self.double, self.quant_type)

    @property
    def nbytes(self) -> int:
        states = filter(None, (self.state, self.state.state2))
        kept = [t for state in states for t in vars(state).values() if isinstance(t, Tensor)]
        return self.codes.nbytes + sum(t.nbytes for t in kept)  # scales, their offset, the values of the codes

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        if (device := self._same_dtype(fn)) != self.device:
            self.codes, self.device = self.codes.to(device), device
            self.state.to(device)


class Int8Store(WeightStore):
    """bitsandbytes' INT8, for comparison: LLM.int8(), arXiv 2208.07339. A scale for each row of a matrix (out, in), and
    products of whole numbers: inputs are rounded as well, but for columns with a value of 6 and more, whose products
    are those of 16-bit numbers. Rounded, so not for training. Needs that package.

    Raises ValueError for a tensor that is no matrix.
    """

    trainable = False
    multiplies = True
    OUTLIER = 6.0
    "of the paper's section 3.2, and bitsandbytes' default"

    def __init__(self, tensor: Tensor) -> None:
        try:
            from bitsandbytes.functional import int8_vectorwise_quant
        except ImportError:
            raise ImportError(
                "Int8Store needs bitsandbytes, which is not installed: pip install bitsandbytes"
            ) from None
        super().__init__(tensor)
        if tensor.ndim != 2:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no rows; INT8 is of matrices")
        # it would say before each product that inputs are rounded from float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        # as bitsandbytes' own layer does: from float16, with no outliers in the weights
        self.codes, self.scales, _ = int8_vectorwise_quant(tensor.detach().contiguous().to(torch.float16))

    def read(self) -> Tensor:
        return (self.codes.float() * (self.scales.float()[:, None] / 127)).to(self.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from bitsandbytes import MatmulLtState, matmul

        state = MatmulLtState()
        state.CB, state.SCB, state.threshold, state.has_fp16_weights = self.codes, self.scales, self.OUTLIER, False
        state.is_training = False  # in training on a CPU it would leave inputs as they are
        return matmul(x, self.codes, bias=bias, state=state, threshold=self.OUTLIER)

    def write(self, tensor: Tensor) -> None:
        self.__init__(self._check(tensor))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        if (device := self._same_dtype(fn)) != self.device:
            self.codes, self.scales, self.device = self.codes.to(device), self.scales.to(device), device


class RowBlocks(WeightStore):
    """A matrix in blocks of rows, each a store of its own, so that a few rows can be read and written without the rest.

    rows_per_block: by default as many as make 2^16 values, of which a block's tables are a small part.
    """

    def __init__(self, tensor: Tensor, factory: StoreFactory, rows_per_block: int | None = None) -> None:
        super().__init__(tensor)
        if tensor.ndim != 2 or not tensor.shape[0]:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no rows; give a matrix")
        self.rows_per_block = rows_per_block or self.usual_rows(tensor.shape[1])
        self.blocks = [factory(block) for block in tensor.detach().split(self.rows_per_block)]
        self.trainable = all(block.trainable for block in self.blocks)

    @staticmethod
    def usual_rows(width: int) -> int:
        """Rows of a block, of so many values each."""
        return max(1, 2**16 // max(1, width))

    def read(self) -> Tensor:
        return torch.cat([block.read() for block in self.blocks])

    def take(self, read: Tensor | None = None) -> Tensor:
        return self.read() if read is None else read  # joined for the caller alone

    def write(self, tensor: Tensor) -> None:
        """Block by block, for old and new ones of all would take twice the memory: an error leaves some of them new."""
        for block, values in zip(self.blocks, self._check(tensor).split(self.rows_per_block), strict=True):
            block.write(values)

    def read_rows(self, ids: Tensor) -> Tensor:
        """Rows (*ids.shape, width). Raises IndexError for one that there is not."""
        self._check_rows(ids)
        if not ids.numel():
            return torch.empty(*ids.shape, self.shape[1], dtype=self.dtype, device=self.device)
        touched, place = torch.unique(ids // self.rows_per_block, return_inverse=True)
        there = torch.cat([self.blocks[index].read() for index in touched.tolist()])
        return there[place * self.rows_per_block + ids % self.rows_per_block]

    def change_rows(self, ids: Tensor, change: Callable[[Tensor, slice], None]) -> None:
        """Write anew the blocks that hold the rows `ids` (n,), ascending and each once: change(rows, which of `ids`
        they are) changes them in place. No other block is decoded."""
        self._check_rows(ids)
        touched, counts = torch.unique_consecutive(ids // self.rows_per_block, return_counts=True)
        start = 0
        for index, count in zip(touched.tolist(), counts.tolist(), strict=True):
            part = slice(start, start + count)
            rows = ids[part] - index * self.rows_per_block
            values = self.blocks[index].take()
            changed = values[rows]
            change(changed, part)
            values[rows] = changed
            self.blocks[index].write(values)
            start += count

    def _check_rows(self, ids: Tensor) -> None:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]:
            raise IndexError(f"rows {int(ids.min())} to {int(ids.max())} of a weight that has {self.shape[0]}")

    def renew(self) -> None:
        for block in self.blocks:
            block.renew()

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        for block in self.blocks:
            block.apply(fn)
        self.dtype, self.device = self.blocks[0].dtype, self.blocks[0].device
