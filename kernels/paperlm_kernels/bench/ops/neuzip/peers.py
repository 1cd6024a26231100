"""Other people's codecs without loss, each called as its package documents it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from paperlm_kernels.bench.ops.neuzip import gaps, planes
from paperlm_kernels.bench.ops.neuzip.coder import FILE_PARTS, Call, Coder
from paperlm_kernels.bench.peers import AbsentError

CHUNK = 65536
"Bytes that nvCOMP codes at once, as NeuZip's authors ask it to."


@dataclasses.dataclass(frozen=True)
class AnsStored:
    """exponents: nvCOMP's array, with how it is decoded. items: uint8, sign and mantissa."""

    exponents: Any
    how: Any
    items: Tensor


class NvComp(Coder):
    """nvCOMP's ANS of the exponents, and two kernels of ours that part and merge bytes: NeuZip as published.

    It works in a stream of its own, which waits for PyTorch's and is waited for: its Python API cannot tell
    PyTorch's stream, number 0, from none.
    """

    package = "nvidia-nvcomp-cu12"
    modules = ("nvidia.nvcomp", "nvidia.libnvcomp")
    needs_gpu = True

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        from nvidia import nvcomp

        self.library, self.side = nvcomp, torch.cuda.Stream(inputs.device)
        self.codec = nvcomp.Codec(
            algorithm="ANS", data_type="|u1", uncomp_chunk_size=CHUNK, cuda_stream=self.side.cuda_stream,
            device_id=self.side.device_index,
        )  # fmt: skip
        self.exponents = torch.empty(self.case.weights, dtype=torch.uint8, device=inputs.device)

    @contextlib.contextmanager
    def beside(self) -> Any:
        """Work of nvCOMP, between what PyTorch did before and does after."""
        self.side.wait_stream(torch.cuda.current_stream())
        yield
        torch.cuda.current_stream().wait_stream(self.side)

    def coded(self) -> tuple[Any, Tensor]:
        """nvCOMP's array and the plane of signs and mantissas."""
        exponents, items = planes.split(self.inputs.weights)
        with self.beside():
            found = self.codec.encode(self.library.as_array(exponents))
        exponents.record_stream(self.side)
        return found, items

    def stored(self) -> AnsStored:
        found, items = self.coded()
        with self.beside():  # with this, decoding waits for nothing
            how = self.codec.decompression_config(found)
        return AnsStored(found, how, items)

    def call(self, part: str) -> Call:
        return self.coded if part == "encode" else super().call(part)

    def decode(self, stored: AnsStored, out: Tensor) -> Tensor:
        with self.beside():
            self.codec.decode(
                stored.exponents, data_type="|u1", out=self.exponents, decompression_config=stored.how
            )  # fmt: skip
        return planes.merge(self.exponents, stored.items, out)

    def bits_of(self, stored: AnsStored) -> float:
        return 8 * (stored.exponents.buffer_size + stored.items.numel()) / self.case.weights


class NvComp13(NvComp):
    """For CUDA 13."""

    package = "nvidia-nvcomp-cu13"


@dataclasses.dataclass(frozen=True)
class HuffmanStored:
    """luts: uint8 (tables, 256). items: uint8, sign and mantissa."""

    luts: Tensor
    streams: gaps.Streams
    items: Tensor
    shared: int

    def copy(self) -> HuffmanStored:
        """Elsewhere in memory."""
        parts = {name: t.clone() for name, t in vars(self.streams).items()}
        return dataclasses.replace(
            self, luts=self.luts.clone(), streams=gaps.Streams(**parts), items=self.items.clone()
        )  # fmt: skip


class DFloat11(Coder):
    """Its code, its tables and its decoding kernel, from files of its package, which itself loads far more.

    Its packing is one symbol at a time in Python, about a minute for 2^26 weights, and is not timed.
    """

    package = "dfloat11"
    modules = ("cupy", "dahuffman")
    needs_gpu = True
    parts: ClassVar[tuple[str, ...]] = ("decode",)

    @functools.cached_property
    def folder(self) -> Path:
        spec = importlib.util.find_spec("dfloat11")
        assert spec and spec.submodule_search_locations
        return Path(spec.submodule_search_locations[0])

    @functools.cached_property
    def kernel(self) -> Any:
        import cupy

        return cupy.RawModule(path=str(self.folder / "decode.ptx")).get_function("decode")

    @functools.cached_property
    def first(self) -> HuffmanStored:
        spec = importlib.util.spec_from_file_location("dfloat11_tools", self.folder / "dfloat11_utils.py")
        assert spec and spec.loader
        tools = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tools)
        exponents, items = planes.split(self.inputs.weights)
        counts = sum(torch.bincount(part.int(), minlength=256) for part in exponents.split(gaps.PART)).tolist()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its tables
            _, _, table = tools.get_32bit_codec({symbol: n for symbol, n in enumerate(counts) if n})
            luts = tools.get_luts(table)
        codes = {symbol: code for symbol, code in table.items() if isinstance(symbol, int)}
        (end,) = (code for symbol, code in table.items() if not isinstance(symbol, int))
        found = gaps.streams(exponents, codes, end)
        most = int(found.positions.diff().max())
        return HuffmanStored(luts.to(items.device), found, items, gaps.THREADS * 4 + 4 + most * 2)

    def stored(self) -> HuffmanStored:
        return self.first.copy()

    def decode(self, stored: HuffmanStored, out: Tensor) -> Tensor:
        s = stored.streams
        self.kernel(
            grid=(-(-len(s.encoded) // (gaps.THREADS * gaps.THREAD_BYTES)),), block=(gaps.THREADS,),
            shared_mem=stored.shared,
            args=[
                stored.luts.data_ptr(), s.encoded.data_ptr(), stored.items.data_ptr(), s.positions.data_ptr(),
                s.gaps.data_ptr(), out.data_ptr(), len(stored.luts), len(s.encoded), out.numel(),
            ],
        )  # fmt: skip
        return out

    def bits_of(self, stored: HuffmanStored) -> float:
        return 8 * (stored.streams.bytes + stored.items.numel() + stored.luts.numel()) / self.case.weights


class SplitZip(Coder):
    """The codec of the file codec_gpu.py of Intelligent-Microsystems-Lab/SplitZip, on the Python path; in chunks of
    1,024 as there, with the exponents of these weights."""

    needs_gpu = True

    @classmethod
    def absent(cls, device: str) -> str | None:
        if (why := super().absent(device)) is not None:
            return why
        if importlib.util.find_spec("codec_gpu") is None:
            return (
                "the project of that name is on GitHub only, and the package that PyPI has under it is another's: put "
                "its file codec_gpu.py on the Python path"
            )
        return None

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        import codec_gpu

        if not hasattr(codec_gpu, "ChunkLocalSplitZipGPU"):
            raise AbsentError(f"{codec_gpu.__file__} is another project's: it has no ChunkLocalSplitZipGPU")
        self.codec = codec_gpu.ChunkLocalSplitZipGPU(device=str(inputs.device), chunk_size=1024)
        self.codec.calibrate(inputs.weights)

    def stored(self) -> Any:
        return self.codec.encode(self.inputs.weights)

    def decode(self, stored: Any, out: Tensor) -> Tensor:
        return self.codec.decode(stored)

    def bits_of(self, stored: Any) -> float:
        return 8 * stored.compressed_bytes / self.case.weights


def on_a_cpu_alone(device: str) -> str | None:
    """Why a codec of the CPU is absent."""
    return "codes on a CPU: ask for --device cpu" if device != "cpu" else None


class ZipNN(Coder):
    """Bytes in, bytes out, with its defaults; a new codec for each call, for reading a header changes version 0.1's."""

    package = "zipnn"
    parts: ClassVar[tuple[str, ...]] = (*Coder.parts, *FILE_PARTS)

    @classmethod
    def absent(cls, device: str) -> str | None:
        return on_a_cpu_alone(device) or super().absent(device)

    def stored(self) -> Any:
        import zipnn

        return zipnn.ZipNN().compress(self.inputs.weights.view(torch.int16).numpy().tobytes())

    def decode(self, stored: Any, out: Tensor) -> Tensor:
        import zipnn

        return torch.frombuffer(zipnn.ZipNN().decompress(stored), dtype=torch.bfloat16)

    def bits_of(self, stored: Any) -> float:
        return 8 * len(stored) / self.case.weights

    def pack_file(self, source: Path, target: Path) -> None:
        import zipnn

        target.write_bytes(zipnn.ZipNN(threads=1).compress(source.read_bytes()))

    def unpack_file(self, source: Path, target: Path) -> None:
        import zipnn

        target.write_bytes(zipnn.ZipNN(threads=1).decompress(source.read_bytes()))
