"""Records that no job has made are refused, however they came to be: altered, or forged with a fitting checksum."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from paperlm_kernels.seal import SEAL, sealed

from paperlm.errors import RecordError
from paperlm.files import SUMS, write_json
from paperlm.plan.project import ROOT
from paperlm.record.record import read_record, write_record

RECORDS = ROOT / "paper_tables/records"
HONEST = next((RECORDS / "gpu/pretrain").glob("llama_71m-pre_ln-s0-*.json"))
OTHER = next((RECORDS / "gpu/pretrain").glob("llama_71m-mix_ln-s0-*.json"))
NAN, INFINITY = float("nan"), float("inf")


def put(*place: str, value: Any) -> Callable[[dict], None]:
    """A forgery that puts a value at a place of the record."""

    def forge(record: dict) -> None:
        for key in place[:-1]:
            record = record[key]
        record[place[-1]] = value

    return forge


def drop(*place: str) -> Callable[[dict], None]:
    def forge(record: dict) -> None:
        for key in place[:-1]:
            record = record[key]
        del record[place[-1]]

    return forge


def swap_series(record: dict) -> None:
    record["series"]["train"], record["series"]["eval"] = record["series"]["eval"], record["series"]["train"]


def shorten_a_row(record: dict) -> None:
    record["series"]["train"]["rows"][3].pop()


def proxy(record: dict) -> None:
    """The numbers of a narrower model under the name of the published size."""
    record["job"] |= {"hidden_size": 64, "intermediate_size": 176, "n_heads": 2}


def of_fewer_updates(record: dict) -> None:
    record["metrics"]["updates"] //= 2
    record["metrics"]["tokens_slots"] //= 2


FORGERIES: dict[str, tuple[Callable[[dict], None], str]] = {
    "perplexity is NaN": (put("metrics", "ppl_true", value=NAN), "finite number"),
    "perplexity is infinite": (put("metrics", "ppl_true", value=INFINITY), "finite number"),
    "perplexity is a word": (put("metrics", "ppl_true", value="low"), "ppl_true"),
    "perplexity below one": (put("metrics", "ppl_true", value=0.5), "ppl_true is 0.5, which is none from 1"),
    "negative perplexity": (put("metrics", "ppl_true", value=-33.0), "ppl_true is -33"),
    "negative loss": (put("metrics", "loss_true", value=-0.1), "loss_true is -0.1"),
    "negative count": (put("metrics", "tokens_nonpad", value=-5), "tokens_nonpad is -5"),
    "no metrics at all": (put("metrics", value=None), "metrics"),
    "a metric that the kind has not": (put("metrics", "ppl", value=12.0), "unknown metric 'ppl'; did you mean"),
    "a list for a metric": (put("metrics", "ppl_true", value=[33.0]), "ppl_true"),
    "a standard error of nothing": (put("standard_errors", "acc", value=0.1), "standard error of acc, which is not"),
    "a negative standard error": (put("standard_errors", "ppl_true", value=-1.0), "standard error of ppl_true -1"),
    "a proxy's shape under the published size": (proxy, "its settings and data are"),
    "a proxy's number of parameters": (put("metrics", "parameters", value=1_234_567), "parameters is 1234567; its set"),
    "half of the updates": (of_fewer_updates, "updates is .* its settings leave it from"),
    "another seed": (put("job", "seed", value=7), "its settings and data are"),
    "another id": (put("job_id", value="llama_71m-pre_ln-s0-00000000"), "its settings and data are"),
    "another kind": (put("kind", value="sft"), "kind sft, of a job of kind pretrain"),
    "a kind that nobody knows": (put("job", "kind", value="pretrian"), "did you mean 'pretrain'"),
    "an outcome that there is not": (put("outcome", value="excellent"), "outcome"),
    "blocked, with numbers": (put("outcome", value="blocked"), "a reason stands beside the outcome blocked"),
    "a reason without need": (put("reason", value="because"), "a reason stands beside the outcome blocked"),
    "rules of another kind alone": (put("behaviour", value={"sft": 1}), "behaviour says nothing of pretrain"),
    "no environment": (drop("environment"), "environment"),
    "a date that is none": (put("environment", "date", value="soon"), "date 'soon'"),
    "no thread": (put("environment", "threads", value=0), "0 threads"),
    "negative cost": (put("cost", "wall_seconds", value=-1.0), "cost: wall_seconds -1"),
    "series of each other": (swap_series, "series train has columns"),
    "a row without its last number": (shorten_a_row, "series train: a row has not 3 numbers"),
    "a loss in the curve below zero": (
        lambda r: r["series"]["train"]["rows"][5].__setitem__(2, -1.0), "train/loss is -1",
    ),
    "a key that no record has": (put("verdict", value="holds"), "verdict"),
    "a schema of the future": (put("schema_version", value=3), "schema_version"),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_record_is_refused_although_its_checksum_fits(forgery, tmp_path):
    forge, message = FORGERIES[forgery]
    record = json.loads(HONEST.read_bytes())
    forge(record)
    path = tmp_path / "gpu/pretrain" / HONEST.name
    write_json(path, sealed(record))
    with pytest.raises(RecordError, match=rf"{path.name}.*{message}"):
        read_record(path, HONEST.stem)


@pytest.mark.parametrize("content", ["", "[]", "5", "null", '"x"', "{}", "{" * 20_000, '{"job_id": NaN}', "\udcff"])
def test_what_is_no_record_is_refused_with_the_remedy(content, tmp_path):
    path = tmp_path / "gpu/pretrain" / HONEST.name
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(RecordError, match=rf"{path.name}: not a valid record .*delete it and run its job again"):
        read_record(path)


def test_a_record_of_another_job_is_refused_under_this_ones_name(tmp_path):
    path = tmp_path / "gpu/pretrain" / HONEST.name
    path.parent.mkdir(parents=True)
    write_json(path, sealed(json.loads(OTHER.read_text())))
    with pytest.raises(RecordError, match=f"is a record of {OTHER.stem}, not of {HONEST.stem}; delete or rename it"):
        read_record(path, HONEST.stem)


def test_a_record_without_a_checksum_that_no_list_has_is_refused(tmp_path):
    path = tmp_path / "gpu/pretrain" / HONEST.name
    path.parent.mkdir(parents=True)
    path.write_bytes(HONEST.read_bytes())
    with pytest.raises(
        RecordError, match=r"no checksum of itself, and none in SHA256SUMS.*; delete it and run its job"
    ):
        read_record(path)


@pytest.mark.parametrize("content", ["ab  gpu/x.json\n", "\xff", f"{'a' * 64}  x\n" * 2, f"{'a' * 64}\n"])
def test_a_damaged_list_of_checksums_is_named(tmp_path, content):
    (tmp_path / SUMS).write_bytes(content.encode("latin-1"))
    path = tmp_path / "gpu/pretrain" / HONEST.name
    path.parent.mkdir(parents=True)
    path.write_bytes(HONEST.read_bytes())
    with pytest.raises(RecordError, match=r"SHA256SUMS: no list of checksums.*; restore it with git"):
        read_record(path)


def test_a_record_is_written_with_a_checksum_of_which_every_value_is_a_part(tmp_path):
    """Each single number of a record, changed to one that could be, is found out."""
    honest = read_record(HONEST)
    path = tmp_path / "gpu/pretrain" / HONEST.name
    write_record(path, honest)
    assert read_record(path, HONEST.stem) == honest
    for name, value in honest.metrics.items():
        stored = json.loads(path.read_bytes())
        stored["metrics"][name] = value + 1 if isinstance(value, int) else value * 1.001
        write_json(path, stored)
        with pytest.raises(RecordError, match="its checksum is another one"):
            read_record(path)
        write_record(path, honest)
    stored = json.loads(path.read_bytes())
    del stored["series"]["train"]["rows"][10]
    write_json(path, stored)
    with pytest.raises(RecordError, match="its checksum is another one"):
        read_record(path)


def test_a_committed_record_without_a_checksum_of_its_own_is_compared_with_the_listed_one(tmp_path):
    path = tmp_path / HONEST.relative_to(RECORDS)
    path.parent.mkdir(parents=True)
    (tmp_path / SUMS).write_text((RECORDS / SUMS).read_text())
    path.write_bytes(HONEST.read_bytes())
    assert read_record(path) == read_record(HONEST)
    path.write_text(HONEST.read_text().replace('"ppl_true": 4', '"ppl_true": 3'))
    assert path.read_bytes() != HONEST.read_bytes()
    with pytest.raises(RecordError, match=f"{SUMS} has another checksum.*; restore it with git"):
        read_record(path)


def test_every_committed_record_has_a_checksum_of_its_own_or_is_listed():
    """A record without one: `(cd paper_tables/records && sha256sum <scale>/<kind>/<id>.json >> SHA256SUMS)`."""
    listed = {line.split()[1] for line in (RECORDS / SUMS).read_text().splitlines()}
    paths = list(RECORDS.glob("*/*/*.json"))
    bare = {p.relative_to(RECORDS).as_posix() for p in paths if SEAL not in json.loads(p.read_bytes())}
    assert paths and bare - listed == set()
    done = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=RECORDS, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
