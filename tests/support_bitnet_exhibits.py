"""Jobs and models behind an exhibit, as tests of BitNet's exhibits ask for them."""

from __future__ import annotations

from paperlm.plan.project import Project


def jobs(project: Project, name: str) -> dict[tuple[str, str], object]:
    return {(cell.row, cell.column): cell.jobs[0] for cell in project.cells(name) if cell.jobs}


def models(project: Project, name: str = "bitnet_table1") -> dict[str, object]:
    """Row -> the trained model behind it."""
    return {row: job.of for (row, _), job in jobs(project, name).items()}
