"""What the Snakemake rules ask: which records a table needs, which cells are trained, how many threads a job gets."""

from __future__ import annotations

import functools
import re
from typing import Any

from paperlm.data.registry import data_id
from paperlm.data.sources import check_present
from paperlm.spec.project import Project
from paperlm.spec.run import RunConfig, digest
from paperlm.train.gpu_lock import visible_gpus


class Jobs:
    """The workflow's view of a project."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.datasets: dict[str, dict[str, Any]] = {
            data_id(run.data_settings()): run.data_settings() for run in project.runs.values()
        }
        if self.trains_missing and any(not self._stored(run) for run in project.runs.values()):
            for settings in self.datasets.values():
                check_present(settings["dataset"], project.config.local_data)

    @functools.cached_property
    def gpus(self) -> list[str]:
        """Cards of this machine; empty on a scale that needs none."""
        return visible_gpus() if self.project.scale.device == "gpu" else []

    @functools.cached_property
    def trains_missing(self) -> bool:
        """Whether cells without a record are trained (config key run_missing)."""
        wish = self.project.config.run_missing
        return wish == "yes" or (wish == "auto" and (self.project.scale.device == "cpu" or bool(self.gpus)))

    def _committed(self, run: RunConfig) -> str:
        return f"paper_tables/records/{self.project.scale.scale}/{run.run_id}.json"

    def _local(self, run: RunConfig) -> str:
        return f"results/{self.project.scale.scale}/runs/{run.run_id}.json"

    def _stored(self, run: RunConfig) -> bool:
        root = self.project.root
        return (root / self._committed(run)).is_file() or (root / self._local(run)).is_file()

    def run_pattern(self) -> str:
        """Regular expression of the runs that the pretrain rule may make: those without a record.

        A record's name holds every setting that can change its number, so a stored one is a source file: no edit of a
        rule and no newer file trains it again. Delete a record to train its run anew.
        """
        return "|".join(re.escape(name) for name, run in self.project.runs.items() if not self._stored(run)) or "none"

    def records(self, table: str) -> list[str]:
        """Record files of a table: committed ones as they are; others only if they exist or will be trained."""
        if self.project.tables[table][1].kind != "runs":
            return []
        found = []
        for cell in self.project.cells(table):
            for run in cell.runs:
                if (self.project.root / self._committed(run)).is_file():
                    found.append(self._committed(run))
                elif self.trains_missing or (self.project.root / self._local(run)).is_file():
                    found.append(self._local(run))
        return list(dict.fromkeys(found))

    def threads_per_run(self, cores: int | None) -> int:
        """Threads a training job claims: one on a CPU; on GPUs so many that jobs never outnumber cards.

        Snakemake ignores `resources: gpu` unless a limit is given, so the bare command `--cores 8` on one card has to
        be held back by threads.
        """
        if not self.gpus or not cores:
            return 1
        return max(1, cores // len(self.gpus))

    def specification_digest(self) -> str:
        """Changes when a declaration changes that a table shows: papers, the scale, titles, claims, notes."""
        papers = {name: paper.model_dump(mode="json") for name, paper in self.project.papers.items()}
        return digest({"papers": papers, "scale": self.project.scale.model_dump(mode="json")})

    def asked_tables(self, arguments: list[str]) -> list[str]:
        """Tables named by a command line such as `snakemake paper_tables/x.csv --cores 2`."""
        names = (re.fullmatch(r"(?:.*/)?paper_tables/(\w+)\.csv", a) for a in arguments)
        return [m[1] for m in names if m and m[1] in self.project.tables]
