"""Mutants that cosmic-ray can make of the areas' modules, and the sample of them that a seed draws."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from support_mutants_areas import AREAS, Area

ROOT = Path(__file__).resolve().parent.parent
SEED, SAMPLE = 20241218, 300
"The day on which Mix-LN appeared; what the record has to hold."

UNTOLD = re.compile(
    r"core/(NoOp|Variable.*"
    r"|Replace(Comparison|Binary)Operator_(Eq_Is|NotEq_IsNot|Is_Eq|IsNot_NotEq)"
    r")"
)
"Operators that are left out: whether equal numbers and strings are one object is the interpreter's affair, not ours."


class Mutant(NamedTuple):
    """A fault: the operator's occurrence in a module, and where that is."""

    area: str
    module: str
    operator: str
    occurrence: int
    start: tuple[int, int]
    end: tuple[int, int]
    text: str = ""
    "the line that it starts in, without the spaces around it"
    nth: int = 0
    "of the lines of the module with that text"
    indent: int = 0
    variant: int = 0
    "of the operator's changes at this place"

    @property
    def place(self) -> str:
        """Where it is, by what stands there: lines that come or go elsewhere leave the sample as it is."""
        columns = (self.start[1] - self.indent, self.end[0] - self.start[0], self.end[1] - self.indent)
        return f"{self.module} {self.text or self.start[0]} {self.nth} {columns}"

    @property
    def key(self) -> str:
        return f"{self.module} {rank(self.place)[:12]} {self.operator} {self.variant}"


def rank(*parts: object) -> str:
    """A draw by lot that parts alone decide."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


def placed(mutants: Iterable[Mutant], sources: dict[str, str]) -> Iterator[Mutant]:
    """With what stands where they are."""
    lines = {name: source.splitlines() for name, source in sources.items()}
    seen: Counter[tuple[str, str]] = Counter()
    for mutant in sorted(mutants):
        here = lines[mutant.module]
        raw = here[mutant.start[0] - 1]
        text = raw.strip()
        nth = sum(line.strip() == text for line in here[: mutant.start[0] - 1])
        named = mutant._replace(text=text, nth=nth, indent=len(raw) - len(raw.lstrip()))
        seen[named.place, mutant.operator] += 1
        yield named._replace(variant=seen[named.place, mutant.operator] - 1)


def files(area: Area, root: Path = ROOT) -> list[str]:
    found = [path.relative_to(root).as_posix() for name in area.modules for path in sorted(root.glob(name))]
    return list(dict.fromkeys(found))


def silent(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans whose change nobody can see: annotations of functions and of what stands in them, which are not evaluated.

    Fields of classes are read by pydantic, so that theirs count.
    """
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
            found += [inner.annotation for inner in ast.walk(node) if isinstance(inner, ast.AnnAssign | ast.arg)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            found.append(node.test)
    return [((e.lineno, e.col_offset), (e.end_lineno or 0, e.end_col_offset or 0)) for e in found if e is not None]


def told(mutants: Iterable[Mutant], sources: dict[str, str]) -> Iterator[Mutant]:
    spans = {name: silent(source) for name, source in sources.items()}
    for mutant in mutants:
        inside = any(start <= mutant.start and mutant.end <= end for start, end in spans[mutant.module])
        if not inside and not UNTOLD.fullmatch(mutant.operator):
            yield mutant


def drawn(
    mutants: Iterable[Mutant], runs: Callable[[Mutant], bool], size: int = SAMPLE, seed: int = SEED
) -> list[Mutant]:
    """One mutant at each of `size` places: as many of each area, or what a small one has; the rest from the others.

    Places are drawn rather than mutants, since a sum alone has eleven. What is no Python (`runs`) is no mutant.
    """
    places: dict[str, dict[str, list[Mutant]]] = {}
    for mutant in sorted(mutants):
        places.setdefault(mutant.area, {}).setdefault(mutant.place, []).append(mutant)
    queues = {
        area: [
            sorted(here[place], key=lambda mutant: rank(seed, mutant.key))
            for place in sorted(here, key=lambda place: rank(seed, place))
        ]
        for area, here in places.items()
    }
    found: list[Mutant] = []
    while len(found) < size and any(queues.values()):
        for area in sorted(queues):
            one = None
            while queues[area] and one is None and len(found) < size:
                one = next(filter(runs, queues[area].pop(0)), None)
            found += [one] if one else []
    return found


def possible(root: Path = ROOT) -> list[Mutant]:
    """Every mutant of every area, by cosmic-ray."""
    import cosmic_ray.commands
    from cosmic_ray.work_db import WorkDB

    found: list[Mutant] = []
    for name, area in AREAS.items():
        names = files(area, root)
        with tempfile.TemporaryDirectory() as folder:
            database = WorkDB(Path(folder) / "work.sqlite", WorkDB.Mode.create)
            cosmic_ray.commands.init([root / file for file in names], database, {})
            for item in database.work_items:
                (spec,) = item.mutations
                module = spec.module_path.relative_to(root).as_posix()
                place = (spec.occurrence, tuple(spec.start_pos), tuple(spec.end_pos))
                found.append(Mutant(name, module, spec.operator_name, *place))
            database.close()
        sources = {file: (root / file).read_text(encoding="utf-8") for file in names}
        mine = placed((m for m in found if m.area == name), sources)
        found = [m for m in found if m.area != name] + list(told(mine, sources))
    return found


def mutated(mutant: Mutant, source: str) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)


def is_python(mutant: Mutant) -> bool:
    try:
        ast.parse(mutated(mutant, (ROOT / mutant.module).read_text(encoding="utf-8")))
    except SyntaxError:
        return False
    return True


def sampled(kept: Path, root: Path = ROOT) -> tuple[list[Mutant], dict[str, int]]:
    """The sample, and how many mutants each area has. Minutes; kept in a file for a call with the same sources."""
    sources = {name: (root / name).read_text(encoding="utf-8") for area in AREAS.values() for name in files(area, root)}
    of = rank(SEED, SAMPLE, json.dumps([{name: area.modules for name, area in AREAS.items()}, sources]))
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if found.get("of") != of:
        everything = possible(root)
        counts = {area: sum(m.area == area for m in everything) for area in AREAS}
        found = {"of": of, "sample": drawn(everything, is_python), "possible": counts}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found), encoding="utf-8")
    sample = [Mutant(*(tuple(part) if isinstance(part, list) else part for part in one)) for one in found["sample"]]
    return sample, found["possible"]


def change(before: str, after: str) -> str:
    """The lines that differ, as `- before` and `+ after`."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines if not line.startswith(("---", "+++", "@@")))
