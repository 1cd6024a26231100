"""Names that papers and exhibits cannot have, because a command line would take them for something else."""

from __future__ import annotations

from paperlm.errors import SpecError
from paperlm.jobs import job_kinds
from paperlm.plan.project import Project

RULES = ("all", "prepare_data", "table", "curves", "figure", "judged_figure", "measure", "published_consistency")
"Rules of the workflow that are no kind of job and no paper."
VERBS = (
    "prepare-data", "run", "why", "plan", "watch", "evidence", "table", "consistency", "curves", "figure", "measure",
    "summary", "documents", "results", "show", "bench", "lm-eval",
)  # fmt: skip
"Verbs of `python -m paperlm`."


def check_names(project: Project) -> None:
    """SpecError for a paper or an exhibit that is called as a rule, a kind of job, a verb or another paper."""
    taken = {name: "a kind of job" for name in job_kinds()}
    taken |= {name: "a verb of python -m paperlm" for name in VERBS} | {
        name: "a rule of the workflow" for name in RULES
    }
    for paper in project.papers:
        _refuse(project, paper, "paper.id", paper, taken)
    taken |= {paper: "a paper" for paper in project.papers}
    for name in project.exhibits:
        _refuse(project, project.exhibit(name)[0].paper.id, "tables and figures", name, taken)


def _refuse(project: Project, paper: str, place: str, name: str, taken: dict[str, str]) -> None:
    if name in taken:
        file = project.root / f"workflow/papers/{paper}.yaml"
        raise SpecError(f"{file}: {place}: {name!r} is {taken[name]} already; rename it")
