"""Settings that a table of hyper-parameters echoes."""

from __future__ import annotations

from paperlm.plan.exhibit import Setting
from paperlm.plan.project import Project
from paperlm.plan.resolve import Context, Resolver


def our_settings(project: Project, name: str, row: str) -> dict[str, Setting]:
    """Settings of a row's job and size at scale paper, the method's options as `norm.<option>`, and constants."""
    paper, table = project.table(name)
    resolver = Resolver(paper, project.load_scale("paper"))
    line = table.lines()[row]
    context = Context(size=line.size, norm=table.norm, norm_source="the table's norm")
    norm, source = resolver.norm(context, f"{name} [{row}]")
    options = {f"norm.{key}": Setting(value=value, source=source) for key, value in norm.items()}
    return {**resolver.settings(line.job, context), **options, **table.constants}
