"""Operations that can be measured, one folder each, found by scanning this one.

To add one: a folder here, or in a folder appended to `paperlm_kernels.bench.ops.__path__`, whose `__init__.py` ends in
`OPERATION = MyOperation()`, with a class that derives from `paperlm_kernels.bench.operation.Operation`. The folder's
name is the operation's: in `python -m paperlm_kernels.bench <name>` and in its rows. Four things are needed:

    summary             one line: what is measured
    cases, methods      name -> one line about it; a method is ours or a peer's
    measures            name -> one line about it: what can be asked of a method
    run(task)           generator of the rows of one method on one case, in a process of its own

The rest has defaults: `metrics` that tables can ask for, peers that are absent, fields that say what the data were
(`identity`), options of its own, measuring in turns, tables, a chart. What is heavy to import, `run` and `absent`
import; the folder is imported by name.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from paperlm_kernels.bench.operation import Operation


def operations() -> dict[str, Operation]:
    """Name -> operation, of every folder in `__path__`. Raises ValueError for a folder that is none."""
    return dict(_scan(tuple(__path__)))


def operation(name: str) -> Operation:
    """One of them. Raises ValueError with the nearest name."""
    known = operations()
    if name not in known:
        from paperlm_kernels.cross_entropy.options import unknown

        raise ValueError(unknown("operation", name, known))
    return known[name]


@functools.cache
def _scan(folders: tuple[str, ...]) -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for info in sorted(pkgutil.iter_modules(folders), key=lambda module: module.name):
        if not info.ispkg:
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        made = getattr(module, "OPERATION", None)
        if not isinstance(made, Operation):
            raise ValueError(
                f"{module.__file__}: no operation; end it in OPERATION = <a class that derives from Operation>()"
            )
        made.name = info.name
        found[info.name] = made
    return found
