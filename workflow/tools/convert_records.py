"""Once: records of schema 1 (runs and rank probes) become records of jobs, under their new names."""

import json
import math
import sys
from pathlib import Path

from paperlm.jobs import job_from
from paperlm.record.record import Record, write_record

ROOT = Path(__file__).resolve().parents[2] / "paper_tables/records"
FILTERED = ("cce_kahan", "cce_kahan_full_c")
"Losses of runs that were made by earlier kernels than today's unfiltered ones."


def job_of(run: dict) -> dict:
    fields = {key: value for key, value in run.items() if key not in ("published_eval_batches", "diverged")}
    if fields["size"] == "phi3.5-mini":
        fields["size"] = "gpt2"
    return {"kind": "pretrain", **fields}


def behaviour_of(job) -> dict:
    found = {"pretrain": 1}
    if job.loss != "cross_entropy":
        found["linear_cross_entropy"] = 1 if job.loss in FILTERED else 2
    return found


def environment_of(old: dict) -> dict:
    return {("cuda" if key == "driver" else key): value for key, value in old.items()}


def pretrain_record(old: dict) -> Record:
    job = job_from(job_of(old["run"]))
    metrics = {k: v for k, v in old["metrics"].items() if k not in ("ppl_paper", "diverged_above")}
    n, paper = old["run"]["published_eval_batches"], old["metrics"]["ppl_paper"]
    metrics["loss_batches"] = None if paper is None else math.log(paper) * (n + 1) / n
    finite = metrics["loss_true"] is not None
    columns = ["update", "tokens", "ppl_true", "ppl_sequences"][: len(old["curve"]["eval"][0])]
    series = {
        "train": {"columns": ["update", "tokens", "loss"], "rows": whole(old["curve"]["train"])},
        "eval": {"columns": columns, "rows": whole(old["curve"]["eval"])},
    }
    cost = {k: v for k, v in old["cost"].items() if k != "loss"}
    return Record.model_validate({
        "job_id": job.job_id, "kind": "pretrain", "behaviour": behaviour_of(job), "job": job.canonical(),
        "outcome": "trained" if finite else "not_finite", "metrics": metrics, "series": series,
        "labels": old["labels"], "data": [old["data"]], "cost": cost, "environment": environment_of(old["environment"]),
    })  # fmt: skip


def whole(rows: list) -> list:
    """Updates and tokens as whole numbers."""
    return [[int(update), int(tokens), *values] for update, tokens, *values in rows]


def rank_record(old: dict, state: str, data: list) -> Record:
    parent = job_from(job_of(old["run"]))
    at = {} if state == "trained" else {"at": "init"}
    job = job_from({"kind": "rank_probability", "of": parent.canonical(), "tokens": 65_536, **at})
    curve = old["states"][state]
    keys = ("share_above", "mass_above", "first_rank_below", "alive_tiles", "loss")
    rows = [list(pair) for pair in zip(curve["ranks"], curve["mean_probability"], strict=True)]
    return Record.model_validate({
        "job_id": job.job_id, "kind": job.kind, "behaviour": {job.kind: 1},
        "ancestors": {parent.job_id: behaviour_of(parent)}, "job": job.canonical(), "outcome": "measured",
        "metrics": {**{k: curve[k] for k in keys}, "threshold": old["threshold"], "tokens": old["tokens"]},
        "series": {"ranks": {"columns": ["rank", "mean_probability"], "rows": rows}}, "data": data,
        "cost": {"wall_seconds": None}, "environment": environment_of(old["environment"]),
    })  # fmt: skip


def main() -> None:
    scale = ROOT / "gpu"
    data = {}
    for path in sorted(scale.glob("*.json")):
        record = pretrain_record(json.loads(path.read_text()))
        data[record.job_id] = [d.model_dump() for d in record.data]
        write_record(scale / record.kind / f"{record.job_id}.json", record)
        path.unlink()
    for path in sorted((scale / "ranks").glob("*.json")):
        old = json.loads(path.read_text())
        parent = job_from(job_of(old["run"])).job_id
        states = ["trained", "initial"] if old["run"].get("loss", "cross_entropy") == "cross_entropy" else ["trained"]
        for state in states:
            record = rank_record(old, state, data[parent])
            write_record(scale / record.kind / f"{record.job_id}.json", record)
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
