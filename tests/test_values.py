"""What is read of declarations and records stays as it was read, and says by name what it is."""

from __future__ import annotations

import ast
import dataclasses
import sys

import pytest

import paperlm.norms
from paperlm.norms import build_method, norm_methods
from paperlm.norms.base import Learned, ModelShape, Wiring
from paperlm.plan.project import ROOT

SOURCE = ROOT / "src/paperlm"
COUNTED_ON = {"bench/ops/pretrain/sides.py Side", "data/chunks.py Chunks", "train/engine.py Progress"}
"Tallies and a side of a measurement: the only dataclasses that change while they are used."


def changeable(node: ast.ClassDef) -> bool:
    """Whether it is a dataclass that is not frozen."""
    for how in node.decorator_list:
        name = how.func if isinstance(how, ast.Call) else how
        if ast.unparse(name) in ("dataclass", "dataclasses.dataclass"):
            given = {word.arg: ast.unparse(word.value) for word in how.keywords} if isinstance(how, ast.Call) else {}
            return given.get("frozen") != "True"
    return False


def test_values_cannot_be_changed_once_they_are_made():
    found = {
        f"{path.relative_to(SOURCE).as_posix()} {node.name}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and changeable(node)
    }
    assert found == COUNTED_ON


@pytest.mark.parametrize("kind", [Learned, Wiring, ModelShape, *norm_methods().values()], ids=lambda c: c.__name__)
def test_options_of_a_method_and_constants_of_a_block_are_given_by_name(kind):
    assert all(field.kw_only for field in dataclasses.fields(kind))


def test_every_block_of_two_streams_has_modules_of_the_same_classes():
    method, shape = build_method({"name": "siamese_norm"}), ModelShape(hidden_size=8, intermediate_size=8, n_layers=3)
    blocks = [method.residuals(layer, shape, lambda: None) for layer in (1, 2, 3)]
    assert len({type(module) for block in blocks for module in block}) == 1
    assert type(method.entry(shape, lambda: None)) is type(method.entry(shape, lambda: None))


HELPED = """
from dataclasses import dataclass
from typing import ClassVar
from paperlm.norms.base import PRE, ModelShape, NormMethod, Wiring
from paperlm.norms.mix_ln import MixLN

class Table:
    name = "no method"

@dataclass(frozen=True, kw_only=True)
class Shared(NormMethod):
    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return PRE

@dataclass(frozen=True, kw_only=True)
class Helped(Shared):
    name: ClassVar[str] = "helped"
    source: ClassVar[str] = "a test"
"""


def test_a_methods_file_may_import_another_method_and_define_helpers(tmp_path, monkeypatch):
    known = set(norm_methods())
    (tmp_path / "test_only_helped.py").write_text(HELPED)
    monkeypatch.setattr(paperlm.norms, "__path__", [*paperlm.norms.__path__, str(tmp_path)])
    norm_methods.cache_clear()
    try:
        assert set(norm_methods()) == known | {"helped"}
    finally:
        monkeypatch.undo()
        sys.modules.pop("paperlm.norms.test_only_helped", None)
        vars(paperlm.norms).pop("test_only_helped", None)
        norm_methods.cache_clear()
