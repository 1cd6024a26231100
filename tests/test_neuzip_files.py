"""The command that packs safetensors files: the same file comes back, damage is refused, nothing is overwritten."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import sys

import pytest
import torch
from paperlm_kernels.neuzip import ContainerError, pack
from paperlm_kernels.neuzip.__main__ import main
from paperlm_kernels.neuzip.files import HEAD, PackedFile, unpack_file
from paperlm_kernels.neuzip.safetensors_file import entries
from safetensors.torch import load_file, save_file
from support_neuzip import gaussian, same_bits


@pytest.fixture
def model(tmp_path):
    tensors = {
        "layer.weight": gaussian(300 * 200).view(300, 200),
        "norm.weight": torch.ones(200).bfloat16(),
        "scale": torch.randn(7),
        "half": torch.randn(3, 5).half(),
        "ids": torch.arange(11),
        "empty": torch.zeros(0, 4).bfloat16(),
        "flag": torch.tensor([True, False]),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "who": "the tests"})
    return path


def test_a_file_comes_back_to_the_byte(model, capsys):
    before = model.read_bytes()
    assert main(["pack", str(model)]) == 0
    packed = model.with_suffix(".nzm")
    said = capsys.readouterr().out
    assert "MB/s" in said and packed.stat().st_size < 0.75 * len(before)
    assert main(["unpack", str(packed), "-o", str(model.with_name("again.safetensors"))]) == 0
    assert model.with_name("again.safetensors").read_bytes() == before
    assert sorted(p.name for p in model.parent.iterdir()) == ["again.safetensors", "model.nzm", "model.safetensors"]


def test_rounding_is_for_matrices_alone(model):
    packed, again = model.with_suffix(".nzm"), model.with_name("again.safetensors")
    assert main(["pack", str(model), "--mant-bits", "3", "--block-norm", "512"]) == 0
    unpack_file(packed, again)
    old, new = load_file(model), load_file(again)
    error = (new["layer.weight"] - old["layer.weight"]).double().norm() / old["layer.weight"].double().norm()
    assert 0.02 < error.item() < 0.03
    assert all(torch.equal(old[name], new[name]) for name in old if name != "layer.weight")


def test_a_file_that_is_there_is_replaced_only_if_told_to(model, capsys):
    packed = model.with_suffix(".nzm")
    packed.write_bytes(b"mine")
    assert main(["pack", str(model)]) == 2 and packed.read_bytes() == b"mine"
    before = model.read_bytes()
    assert main(["pack", str(model), "-o", str(model), "--force", "--mant-bits", "0"]) == 2
    assert model.read_bytes() == before, "what is packed is not what is written, forced or not"
    assert "--force" in capsys.readouterr().err
    assert main(["pack", str(model), "--force"]) == 0 and packed.read_bytes() != b"mine"


def test_tensors_of_every_dtype_of_the_format_come_back_to_the_byte(tmp_path):
    plain, packed, again = (tmp_path / name for name in ("a.safetensors", "a.nzm", "b.safetensors"))
    tensors = {"z": torch.ones(3, dtype=torch.complex64), "w": (torch.randn(64, 64) * 0.02).bfloat16()}
    save_file(tensors, plain)
    assert main(["pack", str(plain)]) == 0 and main(["unpack", str(packed), "-o", str(again)]) == 0
    assert again.read_bytes() == plain.read_bytes()
    for dtype, bits in (("F4", 4), ("F6_E2M3", 6), ("F8_E4M3FNUZ", 8)):
        header = json.dumps({"t": {"dtype": dtype, "shape": [8, 4], "data_offsets": [0, 4 * bits]}}).encode()
        plain.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(4 * bits)))
        assert main(["pack", str(plain), "--force"]) == 0
        assert main(["unpack", str(packed), "-o", str(again), "--force"]) == 0
        assert load_header(again)["t"]["dtype"] == dtype and again.read_bytes()[-4 * bits :] == bytes(range(4 * bits))


def test_a_tensor_of_more_axes_than_a_container_holds_is_kept_as_it_is(tmp_path, capsys):
    plain, packed, again = (tmp_path / name for name in ("a.safetensors", "a.nzm", "b.safetensors"))
    shapes = {"nine": (4, 2, 2, 2, 2, 2, 2, 2, 64), "two": (200, 300)}
    save_file({name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}, plain)
    assert main(["pack", str(plain)]) == 0 and main(["unpack", str(packed), "-o", str(again)]) == 0
    assert again.read_bytes() == plain.read_bytes()
    capsys.readouterr()
    assert main(["inspect", str(packed)]) == 0
    said = capsys.readouterr().out
    assert "nine  BF16 [4, 2, 2, 2, 2, 2, 2, 2, 64]  as it was" in said and "two  BF16 [200, 300]  PFX" in said


def load_header(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def test_inspect_shows_no_control_characters_and_no_ratio_to_nothing(tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    save_file({"a\n\x1b[2J": torch.zeros(64, 64, dtype=torch.bfloat16)}, path)
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "a\\n\\x1b[2J  BF16" in said and "\x1b" not in said and "ratio without bound by field" in said


def test_inspect_says_the_bits_of_each_tensor_and_the_entropies(model, capsys):
    main(["pack", str(model)])
    capsys.readouterr()
    assert main(["inspect", str(model)]) == 0
    plain = capsys.readouterr().out
    assert "exponent 2.5" in plain and "ratio 1.5" in plain and "ids  I64 [11]" in plain
    assert main(["inspect", str(model.with_suffix(".nzm"))]) == 0
    packed = capsys.readouterr().out
    assert "layer.weight  BF16 [300, 200]  PFX: 10." in packed and "norm.weight  BF16 [200]  RAW: 16.000" in packed


def test_inspect_of_a_plain_file_says_what_pack_does_with_each_dtype(model, capsys):
    assert main(["inspect", str(model)]) == 0
    said = capsys.readouterr().out
    assert "scale  F32 [7]  is packed without coding" in said and "half  F16 [3, 5]  is packed without coding" in said
    assert "ids  I64 [11]  is kept as it is" in said


def test_the_last_line_of_a_packed_file_is_of_what_was_packed(model, capsys):
    main(["pack", str(model)])
    capsys.readouterr()
    assert main(["inspect", str(model.with_suffix(".nzm"))]) == 0
    # 11 ids and two flags are none of these
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"all packed: {300 * 200 + 200 + 7 + 15:,} weights, ")


def test_inspect_says_that_a_tensor_was_rounded_and_then_not_coded(tmp_path, capsys):
    tensors = {"small": gaussian(4096).view(64, 64), "norm": torch.ones(64).bfloat16(), "half": torch.ones(8, 8).half()}
    save_file(tensors | {"large": gaussian(300 * 200).view(300, 200)}, tmp_path / "m.safetensors")
    for bits, word in (("3", "bits"), ("1", "bit")):
        assert main(["pack", str(tmp_path / "m.safetensors"), "--mant-bits", bits, "--force"]) == 0
        capsys.readouterr()
        assert main(["inspect", str(tmp_path / "m.nzm")]) == 0
        said = capsys.readouterr().out
        assert f"small  BF16 [64, 64]  RAW, rounded to {bits} mantissa {word}: 16.000 bits per weight" in said
        assert f"large  BF16 [300, 200]  PFX, {bits} mantissa bits: " in said and said.count("rounded") == 1
    assert main(["pack", str(tmp_path / "m.safetensors"), "--force"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "m.nzm")]) == 0
    assert "rounded" not in capsys.readouterr().out


class Terminal(io.StringIO):
    """Standard error that somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["model.safetensors", "model.nzm"])
def test_inspect_has_a_bar_on_a_terminal_alone_and_prints_the_same_lines(model, name, capsys, monkeypatch):
    main(["pack", str(model)])
    capsys.readouterr()
    assert main(["inspect", str(model.with_name(name))]) == 0
    plain = capsys.readouterr()
    assert plain.err == "" and len(plain.out.splitlines()) == 8, "each of seven tensors, and all"
    monkeypatch.setattr("sys.stderr", Terminal())
    assert main(["inspect", str(model.with_name(name))]) == 0
    assert capsys.readouterr().out == plain.out and "100%" in sys.stderr.getvalue()
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["inspect", str(model.with_name(name))]) == 0
    assert capsys.readouterr().out == plain.out and sys.stderr.getvalue() == "", "tqdm is not installed"


def test_damage_anywhere_in_a_packed_file_is_refused(model, tmp_path, capsys):
    main(["pack", str(model)])
    data = model.with_suffix(".nzm").read_bytes()
    bad, out = tmp_path / "bad.nzm", tmp_path / "out.safetensors"
    good = model.read_bytes()
    for place in [*range(64), *range(64, len(data), 1009), len(data) - 1]:
        changed = bytearray(data)
        changed[place] ^= 0x10
        bad.write_bytes(changed)
        try:
            unpack_file(bad, out)
        except ContainerError:
            assert not out.exists()
        else:  # zeros between containers say nothing
            assert out.read_bytes() == good and data[place] == 0
            out.unlink()
    for end in (0, 7, 63, 64, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:end])
        with pytest.raises(ContainerError):
            PackedFile(bad)
    assert main(["unpack", str(bad), "-o", str(out)]) == 2 and "take the whole file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "header",
    [
        "[]", "{", '{"a": 1}', '{"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "BF16", "shape": [-1, -2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "X", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]}}',
    ],
)  # fmt: skip
def test_a_damaged_safetensors_file_is_refused(header, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
    assert main(["pack", str(path)]) == 2 and "damaged" in capsys.readouterr().err
    assert not path.with_suffix(".nzm").exists()
    for data in (b"", b"short", struct.pack("<Q", 2**60) + bytes(40)):
        path.write_bytes(data)
        assert main(["pack", str(path)]) == 2


NO_NUMBERS = ["1e400", "-1e400", "NaN", "1.0", "-1", "true", "null", '"1"', "[1]", "9" * 5000, "[" * 9**5 + "]" * 9**5]


@pytest.mark.parametrize("value", [*NO_NUMBERS, str(2**64)], ids=lambda v: v[:12])
@pytest.mark.parametrize("field", ["shape", "data_offsets"])
def test_sizes_and_offsets_of_a_safetensors_header_that_are_no_whole_numbers_are_refused(field, value):
    right = {"shape": "[2]", "data_offsets": "[0, 4]"}
    for forged in (value, f"[{value}]", f"[0, {value}]", f"[{value}, 4]"):
        fields = ", ".join(f'"{key}": {text}' for key, text in (right | {field: forged}).items())
        with pytest.raises(ValueError, match="damaged"):
            entries(f'{{"a": {{"dtype": "BF16", {fields}}}}}')


def test_sizes_that_nobody_can_count_are_refused_at_once():
    for sizes in ([0, 2**62, 4], [2**62, 4, 0], [0, 2**63], [10**18] * 500_000):
        header = json.dumps({"a": {"dtype": "BF16", "shape": sizes, "data_offsets": [0, 0]}})
        with pytest.raises(ValueError, match="more than 9223372036854775807 elements") as refusal:
            entries(header)
        assert len(str(refusal.value)) < 400


def test_a_name_that_stands_twice_in_a_header_is_refused():
    one = '"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}'
    assert len(entries(f"{{{one}}}")) == 1
    for text in (f"{{{one}, {one}}}", f'{{{one[:-1]}, "dtype": "F16"}}}}'):
        with pytest.raises(ValueError, match="there twice"):
            entries(text)


def with_index(data, text):
    """A packed file with another index, whose SHA-256 fits."""
    *fields, start, _, _ = HEAD.unpack_from(data)
    return HEAD.pack(*fields, start, len(text), hashlib.sha256(text).digest()) + data[HEAD.size : start] + text


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: v[:12])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_places_in_the_index_of_a_packed_file_that_are_no_whole_numbers_are_refused(field, value, model, capsys):
    main(["pack", str(model)])
    path = model.with_suffix(".nzm")
    data = path.read_bytes()
    index = json.loads(data[HEAD.unpack_from(data)[3] :])
    index["tensors"]["ids"][field] = "here"
    path.write_bytes(with_index(data, json.dumps(index).replace('"here"', value).encode()))
    with pytest.raises(ContainerError, match="pack the file anew"):
        PackedFile(path)
    assert main(["inspect", str(path)]) == 2 and "pack the file anew" in capsys.readouterr().err


@pytest.mark.parametrize("value", [*NO_NUMBERS, "2", "7", str(2**64)], ids=lambda v: v[:12])
def test_mantissa_bits_in_the_index_that_nothing_is_rounded_to_are_refused(value, model):
    main(["pack", str(model), "--mant-bits", "3"])
    path = model.with_suffix(".nzm")
    data = path.read_bytes()
    index = json.loads(data[HEAD.unpack_from(data)[3] :])
    assert index["mant_bits"] == 3
    path.write_bytes(with_index(data, json.dumps(index | {"mant_bits": "here"}).replace('"here"', value).encode()))
    with pytest.raises(ContainerError, match="pack the file anew"):
        PackedFile(path)


def test_a_packed_file_without_mantissa_bits_in_its_index_is_read_and_one_with_others_than_its_tensors_refused(model):
    main(["pack", str(model), "--mant-bits", "3"])
    path = model.with_suffix(".nzm")
    data = path.read_bytes()
    index = json.loads(data[HEAD.unpack_from(data)[3] :])
    one = next(e for e in PackedFile(path).entries if e.name == "layer.weight")
    assert (PackedFile(path).rounded_to(one), PackedFile(path).packed(one).header.mant_bits) == (3, 3)
    path.write_bytes(with_index(data, json.dumps(index | {"mant_bits": 1}).encode()))
    with pytest.raises(ContainerError, match=r"'layer.weight' has 3 mantissa bits, in the index 1; pack the file anew"):
        PackedFile(path).packed(one)
    del index["mant_bits"]  # as files were before
    path.write_bytes(with_index(data, json.dumps(index).encode()))
    assert PackedFile(path).rounded_to(one) is None and PackedFile(path).packed(one).header.mant_bits == 3


def test_an_index_of_two_tensors_at_one_place_or_one_twice_or_half_a_letter_is_refused(model):
    main(["pack", str(model)])
    path = model.with_suffix(".nzm")
    data = path.read_bytes()
    index = json.loads(data[HEAD.unpack_from(data)[3] :])
    path.write_bytes(with_index(data, json.dumps(index).encode()))
    unpack_file(path, model.with_name("again.safetensors"))
    assert model.with_name("again.safetensors").read_bytes() == model.read_bytes()
    tensors, header = index["tensors"], index["safetensors_header"]
    for forged, says in (
        (index | {"tensors": tensors | {"ids": tensors["scale"]}}, "upon another"),
        (index | {"safetensors_header": header.replace("the tests", "\ud800")}, "surrogates not allowed"),
        (index | {"safetensors_header": json.loads(header)}, "pack the file anew"),
        (index | {"safetensors_header": "[" * 9**5}, "recursion"),
    ):
        path.write_bytes(with_index(data, json.dumps(forged).encode()))
        with pytest.raises(ContainerError, match=says):
            PackedFile(path)
    twice = json.dumps(index).replace('"ids":', '"scale":', 1)
    path.write_bytes(with_index(data, twice.encode()))
    with pytest.raises(ContainerError, match="'scale' is there twice"):
        PackedFile(path)


def test_tensors_are_read_one_at_a_time(model):
    main(["pack", str(model)])
    given = PackedFile(model.with_suffix(".nzm"))
    one = next(e for e in given.entries if e.name == "layer.weight")
    assert same_bits(given.packed(one).unpack(), load_file(model)["layer.weight"])
    assert json.loads(given.header)["__metadata__"] == {"format": "pt", "who": "the tests"}


def test_a_link_leads_to_the_file_that_is_replaced_and_what_is_no_file_stays(model, tmp_path, capsys):
    aim, link, pipe = tmp_path / "aim.nzm", tmp_path / "link.nzm", tmp_path / "pipe"
    aim.write_bytes(b"old")
    link.symlink_to(aim)
    assert main(["pack", str(model), "-f", "-o", str(link)]) == 0
    assert link.is_symlink() and PackedFile(aim).entries
    os.mkfifo(pipe)
    for other in (pipe, tmp_path):
        assert main(["pack", str(model), "-f", "-o", str(other)]) == 2
        assert "is no file, and stays" in capsys.readouterr().err
    assert pipe.is_fifo()
    for given, says in (
        ([tmp_path], "is no file; give a file"), ([tmp_path / "none"], "is not there; give a file"),
        ([model, "-o", tmp_path / "none" / "m.nzm"], f"there is no folder {tmp_path / 'none'}; make it"),
    ):  # fmt: skip
        assert main(["pack", *map(str, given)]) == 2
        assert says in capsys.readouterr().err


def test_rounding_of_nothing_is_said_and_a_normalizer_without_rounding_refused(tmp_path, capsys):
    save_file({"w": torch.randn(8, 8)}, tmp_path / "m.safetensors")
    assert main(["pack", str(tmp_path / "m.safetensors"), "--block-norm", "512"]) == 2
    assert "block_norm=512 with mant_bits=7" in capsys.readouterr().err
    assert main(["pack", str(tmp_path / "m.safetensors"), "--mant-bits", "3"]) == 0
    assert "no tensor is bfloat16 with two axes or more" in capsys.readouterr().out


def test_a_tensor_that_cannot_be_rounded_is_named_and_infinities_can_be_kept(tmp_path, capsys):
    weights = gaussian(64 * 64).view(64, 64)
    weights[3, 4] = torch.inf
    save_file({"a": gaussian(4096).view(64, 64), "b.weight": weights}, tmp_path / "m.safetensors")
    given = ["pack", str(tmp_path / "m.safetensors"), "--mant-bits", "3"]
    assert main(given) == 2
    assert "tensor 'b.weight': the tensor holds NaN or infinity" in capsys.readouterr().err
    assert main([*given, "--nonfinite", "keep"]) == 0
    assert "2 tensors were rounded to 3 bits" in capsys.readouterr().out
    made = PackedFile(tmp_path / "m.nzm")
    assert made.packed(next(e for e in made.entries if e.name == "b.weight")).unpack()[3, 4] == torch.inf


def test_a_container_is_shown_and_not_taken_for_a_file_of_tensors(tmp_path, capsys):
    path = tmp_path / "w.nzb"
    path.write_bytes(pack(gaussian(8192)).to_bytes())
    assert main(["inspect", str(path)]) == 0
    assert "bits per weight" in capsys.readouterr().out
    assert main(["unpack", str(path)]) == 2
    assert "is one container, as Packed.to_bytes makes it" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["pack", "m", "-o", "x"], ["unpack", "m", "-o", "x"], ["inspect", "m"]])
def test_a_models_packed_weights_are_refused_with_what_reads_them(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"a.0": torch.zeros(8, dtype=torch.uint8)}, "m", {"container": "paperlm_packed"})
    assert main(command) == 2
    assert "as save_packed writes them: paperlm_kernels.stored.read_packed" in capsys.readouterr().err


def test_an_interrupt_is_one_line(model, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("paperlm_kernels.neuzip.__main__.pack_file", interrupted)
    assert main(["pack", str(model)]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_a_link_to_itself_and_a_pipe_are_refused(tmp_path, capsys):
    loop, pipe, model = tmp_path / "loop", tmp_path / "pipe", tmp_path / "m.safetensors"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    save_file({"w": gaussian(2**12)}, model)
    for given in (["pack", model, "-o", loop], *(["inspect", path] for path in (pipe, tmp_path, tmp_path / "none"))):
        assert main(list(map(str, given))) == 2
        assert capsys.readouterr().err.count("\n") == 1
