"""Packs safetensors files, unpacks them, and says what is in them.

python -m paperlm_kernels.neuzip pack model.safetensors         # makes model.nzm
python -m paperlm_kernels.neuzip unpack model.nzm               # makes model.safetensors
python -m paperlm_kernels.neuzip inspect model.nzm              # or model.safetensors

--device cuda packs and unpacks on a GPU: the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from paperlm_kernels.neuzip import fields
from paperlm_kernels.neuzip.entropy import pattern_counts, report_of_counts
from paperlm_kernels.neuzip.files import MAGIC, PackedFile, Told, pack_file, unpack_file
from paperlm_kernels.neuzip.geometry import PROFILES
from paperlm_kernels.neuzip.header import MAGIC as CONTAINER
from paperlm_kernels.neuzip.header import Codec
from paperlm_kernels.neuzip.record import from_bytes
from paperlm_kernels.neuzip.safetensors_file import SafetensorsFile


def main(given: list[str] | None = None) -> int:
    """The command; 2 and a message for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m paperlm_kernels.neuzip", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about, made in (
        ("pack", "a safetensors file", ".nzm"), ("unpack", "a file of packed tensors", ".safetensors")
    ):  # fmt: skip
        command = commands.add_parser(name, help=f"{name} {about}")
        command.add_argument("file", type=Path, help=about)
        command.add_argument("-o", "--out", type=Path, help=f"the file that is made; else FILE with {made}")
        command.add_argument("-f", "--force", action="store_true", help="replace a file that is there")
        command.add_argument("--device", default="cpu", help="where it is done: cpu (the default), cuda or cuda:1")
    packing = commands.choices["pack"]
    packing.add_argument("--profile", choices=PROFILES, default="default")
    packing.add_argument("--mant-bits", type=int, choices=fields.MANT_BITS, default=7, help="7 is without loss")
    packing.add_argument("--block-norm", type=int, choices=fields.NORM_BLOCKS, help="weights a normalizer")
    packing.add_argument(
        "--nonfinite", choices=("error", "keep"), default="error",
        help="what becomes of infinities where mantissas are rounded",
    )  # fmt: skip
    commands.add_parser("inspect", help="what is in either, or in a container (.nzb)").add_argument("file", type=Path)
    args = parser.parse_args(given)
    try:
        if args.command == "inspect":
            inspect(args.file)
        else:
            _convert(args)
    except (ValueError, TypeError, OSError) as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    except torch.cuda.OutOfMemoryError:
        print(f"{parser.prog}: the card has no room for a tensor and its packed form: --device cpu", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; no file was made or replaced", file=sys.stderr)
        return 130
    return 0


def _convert(args: argparse.Namespace) -> None:
    packs = args.command == "pack"
    _refuse_no_file(args.file)
    target = args.out or args.file.with_suffix(".nzm" if packs else ".safetensors")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}; make it, or give another file with -o")
    if target.exists() and target.samefile(args.file):
        raise ValueError(f"{target} is the file that is read, which would be lost; give another name with -o")
    if target.exists() and not args.force:
        raise ValueError(f"{target} is there already; give another name with -o, or --force")
    device = _device(args.device)
    begin = time.perf_counter()
    if packs:
        with _progress(_bytes_of(SafetensorsFile(args.file))) as told:
            options = {name: getattr(args, name) for name in ("profile", "mant_bits", "block_norm", "nonfinite")}
            rounded = pack_file(args.file, target, told, device=device, **options)
        if args.mant_bits < 7:
            count = "1 tensor was" if rounded == 1 else f"{rounded} tensors were"
            which = count if rounded else "no tensor is bfloat16 with two axes or more: none was"
            print(f"{which} rounded to {args.mant_bits} bits of the mantissa")
        before, after = args.file.stat().st_size, target.stat().st_size
    else:
        with _progress(_bytes_of(PackedFile(args.file))) as told:
            unpack_file(args.file, target, told, device=device)
        before, after = target.stat().st_size, args.file.stat().st_size
    seconds = time.perf_counter() - begin
    print(
        f"{target}: {before:,} bytes are {after:,} packed ({after / before:.1%}); {seconds:.1f} s, "
        f"{before / seconds / 1e6:.0f} MB/s of unpacked weights"
    )


def _device(name: str) -> torch.device:
    """Raises ValueError for one that there is not, or that packs nothing."""
    try:
        device = torch.device(name)
        there = device.type == "cpu" or (device.type == "cuda" and 0 <= (device.index or 0) < torch.cuda.device_count())
    except RuntimeError:
        there = False
    if not there:
        raise ValueError(
            f"--device {name}: it is cpu or a GPU that PyTorch sees, of which there are {torch.cuda.device_count()}"
        )
    return device


def _refuse_no_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is {'no file' if path.exists() else 'not there'}; give a file")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Told]:
    """A bar where tqdm is installed and somebody looks."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _: None
        return
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update


def _bytes_of(given: PackedFile | SafetensorsFile) -> int:
    """Of all tensors, as a bar counts them: those of the safetensors file, packed or not."""
    return sum(entry.end - entry.start for entry in given.entries)


def _say(line: str) -> None:
    """Prints a line above the bar, which it would break otherwise."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(line)
    else:
        tqdm.write(line)


def inspect(path: Path) -> None:
    """Prints tensors and their bits, or the entropies of a file that is not packed."""
    _refuse_no_file(path)
    with path.open("rb") as file:
        magic = file.read(8)
    if magic == CONTAINER:
        print(from_bytes(path.read_bytes()))
        return
    packed = magic == MAGIC
    given, lines = (PackedFile(path), _inspect_packed) if packed else (SafetensorsFile(path), _inspect_plain)
    with _progress(_bytes_of(given)) as told:
        lines(given, told)


def _shown(name: str) -> str:
    """A name from a file without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 16 * 2**20 else "without bound"  # weights that are all the same have no entropy


def _inspect_packed(given: PackedFile, told: Told) -> None:
    weights = bits = 0.0
    for entry in given.entries:
        if not entry.is_packed:
            _say(f"{_shown(entry.name)}  {entry.dtype} {list(entry.shape)}  as it was")
            told(entry.end - entry.start)
            continue
        tensor = given.packed(entry)
        h = tensor.header
        kind = h.codec.name + (f", {h.mant_bits} mantissa bits" if h.lossy else "")
        if h.codec == Codec.RAW and (bits_left := given.rounded_to(entry)) is not None:
            kind += f", rounded to {bits_left} mantissa bit{'' if bits_left == 1 else 's'}"
        kind += f", blocks of {h.block_norm}" if h.block_norm else ""
        said = f"{kind}: {tensor.bits_per_weight:.3f} bits per weight"
        _say(f"{_shown(entry.name)}  {entry.dtype} {list(entry.shape)}  {said}")
        weights, bits = weights + h.numel, bits + h.numel * tensor.bits_per_weight
        told(entry.end - entry.start)
    _say(f"all packed: {int(weights):,} weights, {bits / max(1, weights):.3f} bits per weight")


def _inspect_plain(given: SafetensorsFile, told: Told) -> None:
    total = 0
    for entry in given.entries:
        if entry.dtype != "BF16":
            said = "is packed without coding" if entry.is_packed else "is kept as it is"
            _say(f"{_shown(entry.name)}  {entry.dtype} {list(entry.shape)}  {said}")
            told(entry.end - entry.start)
            continue
        counts = pattern_counts(given.tensor(entry))
        total = total + counts
        r = report_of_counts(counts)
        _say(
            f"{_shown(entry.name)}  BF16 {list(entry.shape)}  exponent {r.exponent:.3f}, mantissa {r.mantissa:.3f} bits"
        )
        told(entry.end - entry.start)
    if isinstance(total, int) or not total.sum():
        _say("no bfloat16 weights")
        return
    r = report_of_counts(total)
    _say(
        f"all bfloat16: sign {r.sign:.4f}, exponent {r.exponent:.4f}, mantissa {r.mantissa:.4f}, joint {r.joint:.4f} "
        f"bits; ratio {_ratio(r.ratio_sum)} by field, {_ratio(r.ratio_joint)} jointly"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a part of a file is removed
    raise SystemExit(main())
