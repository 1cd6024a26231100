"""At what rate Snakemake's scheduler begins jobs."""

from __future__ import annotations

from support import copy_tracked
from support_workflow import snakemake


def test_one_machine_has_no_limit_of_jobs_a_second_unless_another_than_snakemakes_own_is_asked_for(tmp_path):
    """Under one the scheduler looks for work once a second for each job that has ended."""
    clone = copy_tracked(tmp_path / "clone")
    asked = "limiter = workflow.scheduler.job_rate_limiter; print('limit', limiter and limiter.max_jobs)"
    with (clone / "Snakefile").open("a") as file:
        file.write(f"\n\nonsuccess:\n    {asked}\n")
    assert "limit None" in snakemake(clone, "paper_tables/cce_tableA3.csv")
    out = snakemake(clone, "paper_tables/cce_figure2.svg", "--max-jobs-per-timespan", "50/1s")
    assert "limit 50" in out
