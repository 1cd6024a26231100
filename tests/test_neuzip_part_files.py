"""Files that are written beside their place and take it: what is left of others, links, and the order of metadata."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import paperlm_kernels
import pytest
import torch
from paperlm_kernels.neuzip.part_files import replacing
from paperlm_kernels.neuzip.safetensors_file import sort_metadata
from safetensors import safe_open
from safetensors.torch import save_file
from support_neuzip import gaussian


def test_metadata_are_put_in_order_and_nothing_else_of_a_file_changes(tmp_path):
    path = tmp_path / "a.safetensors"
    strange = '"\\\n\t\x00\x1b\x7f\u2028é😀</'
    metadata = {f"{name}{strange}": strange * 3 for name in "qwertyuiop"}
    save_file({strange: torch.arange(6).view(2, 3), "b": torch.zeros(0)}, path, metadata=metadata)
    before = path.read_bytes()
    sort_metadata(path)
    after, length = path.read_bytes(), int.from_bytes(before[:8], "little")
    assert list(json.loads(after[8 : 8 + length])["__metadata__"]) == sorted(metadata)
    assert after[:8] == before[:8] and after[8 + length :] == before[8 + length :]
    assert json.loads(after[8 : 8 + length]) == json.loads(before[8 : 8 + length])
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == metadata and torch.equal(file.get_tensor(strange), torch.arange(6).view(2, 3))


def written(path: Path, data: bytes = b"new") -> None:
    with replacing(path) as part:
        part.write_bytes(data)


def test_what_a_killed_process_left_of_a_file_is_removed_when_it_is_written_again(tmp_path):
    path = tmp_path / "m.nzm"
    code = (
        "import os, sys; from pathlib import Path; from paperlm_kernels.neuzip.part_files import replacing\n"
        "with replacing(Path(sys.argv[1])) as part: part.write_bytes(b'half'); print(part, flush=True); input()"
    )
    env = os.environ | {"PYTHONPATH": str(Path(paperlm_kernels.__file__).parent.parent)}
    writing, other = (
        subprocess.Popen([sys.executable, "-c", code, path], stdin=-1, stdout=-1, text=True, env=env) for _ in range(2)
    )
    left, held = Path(writing.stdout.readline().strip()), Path(other.stdout.readline().strip())
    writing.kill()
    writing.wait()
    written(path)
    assert left.exists() and held.exists(), "a part of now can be somebody's who has no lock yet"
    for part in (left, held):
        os.utime(part, (0, 0))
    mine = tmp_path / ".m.nzm.original"
    mine.write_bytes(b"of somebody")
    os.utime(mine, (0, 0))
    written(path, b"newer")
    assert not left.exists() and held.exists() and mine.exists() and path.read_bytes() == b"newer"
    other.communicate("\n")  # it ends, and what it wrote takes the place
    assert other.returncode == 0 and path.read_bytes() == b"half" and not held.exists()


def test_a_file_keeps_its_place_where_its_successor_is_not_completed(tmp_path):
    path, link = tmp_path / "m.nzm", tmp_path / "link"
    written(path)
    link.symlink_to(path)
    with pytest.raises(KeyError), replacing(path) as part:
        part.write_bytes(b"half")
        raise KeyError
    assert path.read_bytes() == b"new" and {p.name for p in tmp_path.iterdir()} == {"m.nzm", "link"}
    written(link, b"through the link")
    assert link.is_symlink() and path.read_bytes() == b"through the link"


def test_a_file_whose_metadata_cannot_be_ordered_in_place_stays_as_it_is(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"z": torch.arange(6), "a": torch.zeros(3).bfloat16()}
    save_file(tensors, path)
    plain = path.read_bytes()
    sort_metadata(path)
    assert path.read_bytes() == plain
    save_file(tensors, path, metadata={"y": "1", "x": "2"})
    sort_metadata(path)
    data = path.read_bytes()
    assert list(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) == ["__metadata__", "z", "a"]
    for text in (
        b'{"__metadata__":{"b":"\\u0001\xc3\xa9","a":"2"}}',
        b'{"__metadata__":{"b":"\x7f\\/"}}',
        b'{ "__metadata__":{}}',
    ):
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"tail")
        sort_metadata(path)
        now = path.read_bytes()
        assert now[8 + len(text) :] == b"tail" and json.loads(now[8 : 8 + len(text)]) == json.loads(text)


def test_without_locks_a_file_is_written_all_the_same_and_nothing_beside_it_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("paperlm_kernels.neuzip.part_files.fcntl", None)
    path, part = tmp_path / "m.nzm", tmp_path / ".m.nzm.part-left"
    part.touch()
    os.utime(part, (0, 0))
    written(path)
    assert path.read_bytes() == b"new" and part.exists()


def test_a_command_that_is_told_to_end_leaves_no_part_of_a_file(tmp_path):
    save_file({str(i): gaussian(2**21, seed=i) for i in range(60)}, tmp_path / "m.safetensors")
    command = [sys.executable, "-m", "paperlm_kernels.neuzip", "pack", str(tmp_path / "m.safetensors")]
    begun = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path(paperlm_kernels.__file__).parents[1])})
    while begun.poll() is None and len(list(tmp_path.iterdir())) == 1:
        time.sleep(0.01)
    begun.terminate()
    assert begun.wait(60) == 128 + signal.SIGTERM
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
