"""Operations whose folder says in files of their own what is measured, and how.

`declared` has CASES, each with `small()` and `listed()`, GROUPS, METHODS and METRICS and loads no torch; `methods` has
what measures each method, `task` the function rows_of, `report` the function tables. They are imported where they are
asked for: a list of the cases is fast.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, ClassVar

from paperlm_kernels.bench.operation import Defaults, Operation, Row, Task
from paperlm_kernels.bench.peers import label, why_absent


class Declared(Operation):
    """An operation of such a folder, in whose __init__ its class stands."""

    by_default: ClassVar[tuple[str, str]]
    "measures where none are named, and where a table asks"
    shape: ClassVar[tuple[str, ...]]
    "fields of a case that its rows have"
    behaviour: ClassVar[int]
    "of paperlm_kernels.behaviour"

    def of_folder(self, file: str) -> Any:
        """A module of the operation's folder."""
        return importlib.import_module(f"{type(self).__module__}.{file}")

    @property
    def cases(self) -> Mapping[str, str]:
        return {name: case.listed() for name, case in self.of_folder("declared").CASES.items()}

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return self.of_folder("declared").GROUPS

    @property
    def methods(self) -> Mapping[str, str]:
        return self.of_folder("declared").METHODS

    @property
    def metrics(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        return self.of_folder("declared").METRICS

    def contender(self, method: str) -> Any:
        """What measures a method; it has `absent(device)` and `package`."""
        return self.of_folder("methods").METHODS[method]

    def absent(self, method: str, device: str) -> str | None:
        return self.contender(method).absent(device)

    def label(self, method: str) -> str:
        return label(method, self.contender(method).package)

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        methods, measures = ",".join(self.methods), self.by_default[for_tables]
        if device == "cuda":
            return Defaults("all", methods, measures, 200, 3, 4.0)
        return Defaults("cpu", methods, measures, 3, 1, 1.0)

    def identity(self, task: Task) -> dict[str, Any]:
        case = task.sized(self.of_folder("declared").CASES)
        shape = {name: getattr(case, name) for name in self.shape}
        return {"shape": shape, "source": "synthetic", "behaviour": self.behaviour}

    def tables(self, found: Iterable[Row]) -> str:
        return self.of_folder("report").tables(found)

    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        yield from self.of_folder("task").rows_of(self, task)


class Contender(abc.ABC):
    """A method of an operation that is timed on cold copies of what it reads (paperlm_kernels.bench.cold)."""

    package: ClassVar[str | None] = None
    "a peer's; None: ours, or PyTorch's"
    modules: ClassVar[tuple[str, ...]] = ()
    "that the peer needs besides"
    needs_gpu: ClassVar[bool] = False
    bits: ClassVar[float]
    "of a number in what it reads"
    parts: ClassVar[tuple[str, ...]]
    "that it can be asked for"

    def __init__(self, inputs: Any) -> None:
        """Raises AbsentError where it cannot do this case."""
        self.inputs, self.case = inputs, inputs.case

    @classmethod
    def absent(cls, device: str) -> str | None:
        """Why it cannot run here at all."""
        return why_absent(device, package=cls.package, modules=cls.modules, needs_gpu=cls.needs_gpu)

    @abc.abstractmethod
    def call(self, part: str) -> Callable[[], Any]:
        """A call of a part with its own copy of what it reads; it returns the tensor that is made."""

    @abc.abstractmethod
    def truth(self) -> Any:
        """What the first of the parts should give, float64."""
