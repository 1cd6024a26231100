"""Where the command packs and unpacks: on the device that is asked for, with the same bytes."""

from __future__ import annotations

import pytest
import torch
from paperlm_kernels.neuzip import __main__ as command
from paperlm_kernels.neuzip import files
from paperlm_kernels.neuzip.__main__ import main
from paperlm_kernels.neuzip.files import PackedFile, pack_file, unpack_file
from safetensors.torch import save_file
from support_neuzip import gaussian

META = torch.device("meta")
"A device that holds no values: what goes there cannot be packed, nor come back."


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": gaussian(300 * 200).view(300, 200), "b": torch.ones(7)}, path)
    return path


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("cuda:7", "there are 0"),
        ("cuda:128", "there are 0"),
        ("meta", "meta: it is cpu or a GPU"),
        ("tpu", "tpu: it is cpu"),
    ],
)
@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_a_device_that_there_is_not_is_refused_before_anything_is_made(
    command, name, there, model, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    pack_file(model, model.with_suffix(".nzm"))
    given = model if command == "pack" else model.with_suffix(".nzm")
    assert main([command, str(given), "-o", str(model.with_name("new")), "--device", name]) == 2
    assert there in capsys.readouterr().err and not model.with_name("new").exists()


def test_each_tensor_goes_to_the_device_on_both_ways(model, tmp_path):
    with pytest.raises(TypeError, match="device meta"):
        pack_file(model, tmp_path / "m.nzm", device=META)
    pack_file(model, tmp_path / "m.nzm")
    given = PackedFile(tmp_path / "m.nzm")
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        given.bytes(given.entries[0], META)


def test_the_command_gives_its_device_to_both_ways_and_asks_it_for_errors(model, monkeypatch, capsys):
    device, given, asked, read = torch.device("cpu", 7), [], [], files.PackedFile.bytes
    monkeypatch.setattr(command, "_device", lambda name: device)
    monkeypatch.setattr(command, "pack_file", lambda *a, device, **o: given.append(device) or pack_file(*a, **o))
    monkeypatch.setattr(files.PackedFile, "bytes", lambda self, entry, d: given.append(d) or read(self, entry))
    monkeypatch.setattr(files, "raise_found", asked.append)
    assert main(["pack", str(model), "--mant-bits", "3"]) == 0
    assert "1 tensor was rounded to 3 bits" in capsys.readouterr().out
    assert main(["unpack", str(model.with_suffix(".nzm")), "-f"]) == 0
    assert given == [device] * 3 and len(asked) == 2, "one file packed, two tensors unpacked"


def test_a_card_without_room_is_said_in_a_line(model, monkeypatch, capsys):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(files, "pack", full)
    assert main(["pack", str(model)]) == 2 and "--device cpu" in capsys.readouterr().err
    assert not model.with_suffix(".nzm").exists()


def test_a_gpu_is_there_up_to_the_last(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert command._device("cuda:0") == torch.device("cuda:0") and command._device("cuda").type == "cuda"
    with pytest.raises(ValueError, match="of which there are 1"):
        command._device("cuda:1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("profile", ["default", "fix4"])
def test_a_gpu_makes_the_same_files(profile, model, tmp_path):
    files = [tmp_path / f"{name}.nzm" for name in ("cpu", "cuda")]
    for path in files:
        pack_file(model, path, device=torch.device(path.stem), profile=profile)
    assert files[0].read_bytes() == files[1].read_bytes()
    unpack_file(files[0], tmp_path / "again", device=torch.device("cuda"))
    assert (tmp_path / "again").read_bytes() == model.read_bytes()
