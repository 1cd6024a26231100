"""Operations whose folder says in files of their own what is measured, and how.

`declared` has CASES, GROUPS, METHODS and METRICS and loads no torch, `methods` what measures each method, `task` rows_of.
They are imported where they are asked for: a list of the cases is fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping
from typing import Any

from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.peers import label


class Declared(Operation):
    """An operation of such a folder, in whose __init__ its class stands."""

    def of_folder(self, file: str) -> Any:
        """A module of the operation's folder."""
        return importlib.import_module(f"{type(self).__module__}.{file}")

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

    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        yield from self.of_folder("task").rows_of(self, task)
