"""Where everything of a job lies. Every path of a record, model, lock or log is spelled here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paperlm.data.settings import DataSettings
from paperlm.jobs.base import Job

BENCH = "paper_tables/records/bench"
"Committed measurements, one file of JSON lines an operation."
REFERENCE = "docs/reference"
"What one named machine made at each scale: for reading and comparing, never an input of a table."
CALIBRATION = "results/calibration.json"
"How fast this machine is."


@dataclass(frozen=True)
class Places:
    """Paths of one scale below the root of the repository. They are relative, as Snakemake wants them."""

    root: Path
    scale: str

    def committed(self, job: Job) -> str:
        """A record that came with the repository."""
        return f"paper_tables/records/{self.scale}/{job.kind}/{job.job_id}.json"

    def made(self, job: Job) -> str:
        """A record that is made here."""
        return f"results/{self.scale}/{job.kind}/{job.job_id}.json"

    def model(self, job: Job) -> str:
        """Folder of the model that a job leaves."""
        return f"results/{self.scale}/models/{job.job_id}"

    def manifest(self, job: Job) -> str:
        """Checksums of that folder, written last."""
        return f"{self.model(job)}/manifest.json"

    def work(self, job: Job) -> str:
        """Checkpoints and other unfinished work; no declared output, so that nothing deletes it."""
        return f"results/{self.scale}/work/{job.job_id}"

    def lock(self, job: Job) -> str:
        """File that the process which makes the job holds."""
        return f"results/{self.scale}/locks/{job.job_id}"

    def log(self, job: Job) -> str:
        """What the job prints."""
        return f"logs/{self.scale}/{job.kind}/{job.job_id}.log"

    def again(self, exhibit: str) -> str:
        """Written when a finished exhibit has to be built again."""
        return f"results/{self.scale}/again/{exhibit}.json"

    def data(self, settings: DataSettings) -> str:
        """Manifest of prepared data; scales share it."""
        return f"results/data/{settings.data_id}/manifest.json"

    @property
    def costs(self) -> str:
        """What jobs took on the machine of the reference."""
        return f"{REFERENCE}/{self.scale}/costs.json"

    def measurements(self, op: str, case: str) -> str:
        """Rows of an operation that is measured here."""
        return f"results/{self.scale}/bench/{op}/{case}.jsonl"

    def committed_measurements(self, op: str) -> str:
        """Rows of an operation that came with the repository."""
        return f"{BENCH}/{op}.jsonl"

    def is_file(self, path: str) -> bool:
        """Whether a path of this class exists as a file."""
        return (self.root / path).is_file()
