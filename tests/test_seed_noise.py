"""How a number varies between seeds of training: what the declared noise was measured on, and the unit of each."""

from __future__ import annotations

import math
import re
import statistics

import pytest
from support_tables import record_of

from paperlm.plan.project import ROOT, Project
from paperlm.record.record import read_record, write_record
from paperlm.tables.jobs import cell_samples
from paperlm.tables.results import collect

TABLE = "mixln_table1"


def test_the_seed_noise_of_the_gpu_scale_is_that_of_its_committed_records():
    noise, rule = Project({"scale": "gpu"}).scale.seed_noise, Project({"scale": "gpu"}).diverged_rule(TABLE)

    def variances(size: str) -> dict[str, float]:
        logs: dict[str, list[float]] = {}
        for path in sorted((ROOT / "paper_tables/records/gpu/pretrain").glob(f"llama_{size}-*.json")):
            record = read_record(path)
            if record.metrics["ppl_true"] < rule.threshold(record.metrics["unigram_perplexity"]):
                of = f"{path.stem.split('-s')[0]}, {record.metrics['updates']:g} updates"
                if (record.job["embed_init_std"], record.job["numerics"]) == (0.02, "pure_bf16"):
                    logs.setdefault(of, []).append(math.log(record.metrics["ppl_true"]))
        return {method: statistics.variance(values) for method, values in logs.items() if len(values) > 1}

    trained = [*variances("71m").values()]
    assert len(trained) == 4
    assert noise.value == pytest.approx(statistics.mean(trained) ** 0.5, abs=5e-5)
    larger = variances("130m")
    named = [larger[f"llama_130m-{method}, 3500 updates"] for method in ("pre_ln", "mix_ln", "deep_norm")]
    assert noise.source.endswith(f"{statistics.mean(named) ** 0.5:.4f}")


def test_the_seed_noise_of_bitnet_on_a_card_is_that_of_the_runs_that_vary_most_there():
    """One recipe, made six times with a seed, twice with another, once with a third: three records, and the source."""
    noise = Project({"scale": "gpu"}).seed_noise("bitnet_table1")
    found = [float(number) for number in re.findall(r"\b\d\d\.\d\b", noise.source)]
    runs = (f"llama_p0-pre_ln-b158-{run}.json" for run in ("s0-5978fa14", "s1-725241a9", "s2-810abfd5"))
    kept = [read_record(ROOT / "paper_tables/records/gpu/pretrain" / run) for run in runs]
    assert [found[0], found[6], found[8]] == [round(record.metrics["ppl_true"], 1) for record in kept]
    assert len(found) == 9
    assert noise.value == pytest.approx(statistics.stdev(map(math.log, found)), abs=5e-4)
    of_seeds: dict[str, list[float]] = {}  # GPT-2's shape, four losses of three seeds each, varied most before
    for path in sorted((ROOT / "paper_tables/records/gpu/pretrain").glob("llama_gpt2-*.json")):
        of_seeds.setdefault(path.stem.split("-s")[0], []).append(read_record(path).metrics["ppl_true"])
    assert len(of_seeds) == 4 and {len(seeds) for seeds in of_seeds.values()} == {3}
    assert noise.value > max(statistics.stdev(seeds) / statistics.fmean(seeds) for seeds in of_seeds.values())


@pytest.mark.parametrize(
    ("table", "cell", "deviation"),
    [
        ("neuzip_table3a", ("Vanilla", "Llama-3 8B PPL"), lambda share: share * 1.4 * math.exp(4.2)),
        ("neuzip_table1", ("LOMO", "Llama-3 8B Loss"), lambda share: share),
        ("neuzip_table1", ("LOMO", "Llama-3 8B Loss a word"), lambda share: share * 1.4),
        ("neuzip_table1", ("LOMO", "Llama-3 8B Peak"), lambda share: 0.0),
        ("bitnet_switch", ("700M, a4.8", "At the end"), lambda share: math.hypot(0.1, share * math.exp(3.0))),
        ("bitnet_switch", ("700M, a4.8", "Loss at the End"), lambda share: math.hypot(0.1, share)),
    ],
)
def test_seed_noise_is_in_the_unit_of_each_number(tmp_path, table, cell, deviation):
    """A share of a token's perplexity: so many nats of its loss, of a word's perplexity as often as it has tokens, and
    of bytes that follow from shapes nothing."""
    project = Project({"scale": "paper" if "word" in cell[1] else "gpu", "seeds": [0]})
    values = {"loss": 3.0, "loss_true": 3.0, "perplexity": math.exp(3.0)}
    values |= {"loss_word": 3.0 * 1.4, "word_perplexity": math.exp(3.0 * 1.4)}
    paths = []
    for job in project.jobs_of(table):
        errors = {"perplexity": 0.1, "loss": 0.1} if job.kind == "text_perplexity" else {}
        least = {metric: least for metric, (least, _) in job.bounds().items()}
        metrics = {m: least.get(m, values.get(m, 1.0)) for m in job.metrics()}
        paths.append(tmp_path / f"{job.job_id}.json")
        write_record(paths[-1], record_of(job, metrics, standard_errors=errors))
    found = cell_samples(project, project.table(table)[1], collect(project, table, paths))
    assert found[cell].deviation == pytest.approx(deviation(project.seed_noise(table).value))
