"""What the Snakemake rules ask: which records a table needs, which cells are trained, how many threads a job gets."""

from __future__ import annotations

import functools
import re
from typing import Any

from paperlm.data.registry import data_id
from paperlm.data.sources import check_present
from paperlm.spec.project import Project
from paperlm.spec.run import RunConfig, digest
from paperlm.tables.measurements import measured_methods, read_rows
from paperlm.train.gpu_lock import visible_gpus


class Jobs:
    """The workflow's view of a project."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.datasets: dict[str, dict[str, Any]] = {
            data_id(run.data_settings()): run.data_settings() for run in project.runs.values()
        }

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
        """Files a table is built from: committed ones as they are; others only if they exist or will be made.

        DataError if a run has to be trained whose text is not at hand.
        """
        _, spec = self.project.table(table)
        if spec.kind == "runs":
            return self._run_records(table)
        if spec.kind == "measurements":
            found = [self._measurement(spec.op, case) for case in measured_methods(self.project, table)]
            return list(dict.fromkeys(filter(None, found)))
        return []

    def figure_records(self, figure: str) -> list[str]:
        """Files a figure is drawn from: those of its table, or of its probed models."""
        _, spec = self.project.figure(figure)
        if spec.kind == "rank_probability":
            return self._rank_records(spec.table)
        return self.records(spec.table) if spec.table else []

    def _rank_records(self, table: str) -> list[str]:
        """Probes of the first seed of each row: committed ones; others if they exist or their model is at hand."""
        root, scale = self.project.root, self.project.scale.scale
        found = []
        for run in (cell.runs[0] for cell in self.project.cells(table) if cell.runs):
            committed = f"paper_tables/records/{scale}/ranks/{run.run_id}.json"
            local = f"results/{scale}/ranks/{run.run_id}.json"
            model = root / f"results/{scale}/models/{run.run_id}/config.json"
            trained_here = (root / self._local(run)).is_file() and model.is_file()
            will_be_trained = self.trains_missing and not self._stored(run)
            if (root / committed).is_file():
                found.append(committed)
            elif (root / local).is_file() or trained_here or will_be_trained:
                found.append(local)
        return found

    def _run_records(self, table: str) -> list[str]:
        found = []
        for run in (run for cell in self.project.cells(table) for run in cell.runs):
            if (self.project.root / self._committed(run)).is_file():
                found.append(self._committed(run))
            elif self.trains_missing or self._stored(run):
                found.append(self._local(run))
                if not self._stored(run):
                    check_present(run.dataset, self.project.config.local_data)
        return list(dict.fromkeys(found))

    # -- measurements -------------------------------------------------------------------------------------------------

    def _measurement(self, op: str, case: str) -> str | None:
        """File with the rows of a case: the committed one if it has any, else one that exists or will be made."""
        committed = f"paper_tables/records/bench/{op}.jsonl"
        if case in self._committed_cases(op):
            return committed
        local = f"results/{self.project.scale.scale}/bench/{op}/{case}.jsonl"
        return local if self.trains_missing or (self.project.root / local).is_file() else None

    @functools.cache  # noqa: B019 - Jobs live as long as the process
    def _committed_cases(self, op: str) -> frozenset[str]:
        """Cases with committed rows. They were made on a GPU: the CPU scales measure their own."""
        path = self.project.root / f"paper_tables/records/bench/{op}.jsonl"
        if self.project.scale.device == "cpu" or not path.is_file():
            return frozenset()
        return frozenset(row["case"] for row in read_rows(path))

    @functools.cached_property
    def measurements(self) -> dict[tuple[str, str], list[str]]:
        """(operation, case) that can be measured at this scale -> the methods that tables ask for."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, (_, table) in self.project.tables.items():
            if table.kind == "measurements":
                for case, methods in measured_methods(self.project, name).items():
                    known = found.setdefault((table.op, case), [])
                    known += [method for method in methods if method not in known]
        return found

    def methods(self, op: str, case: str) -> list[str]:
        """Methods to measure on a case: those of the tables; on a CPU what the benchmark offers there."""
        return self.measurements[op, case] if self.project.scale.device == "gpu" else []

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

    def asked_for(self, arguments: list[str]) -> list[str]:
        """Tables, and figures with claims, named by a command line such as `snakemake paper_tables/x.csv --cores 2`."""
        found = (re.fullmatch(r"(?:.*/)?paper_tables/(\w+)\.(csv|svg|png|claims\.csv)", a) for a in arguments)
        names = dict.fromkeys(m[1] for m in found if m)
        judged = {name for name, (_, figure) in self.project.figures.items() if figure.claims}
        return [name for name in names if name in self.project.tables or name in judged]
