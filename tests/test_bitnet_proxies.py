"""BitNet a4.8: public checkpoints beside its rows, and the smaller models that stand for its sizes."""

from __future__ import annotations

import numpy as np
import pytest
from support_bitnet_exhibits import jobs, models
from support_tables import edited

from paperlm.checks import open_project
from paperlm.errors import SpecError
from paperlm.plan.project import Project
from paperlm.tables.jobs import proxies


@pytest.fixture(scope="module")
def paper() -> Project:
    return Project({"scale": "paper"})


def test_public_checkpoints_stand_beside_the_printed_rows_at_scale_paper_alone(paper, tiny):
    for name in ("bitnet_table1", "bitnet_table2", "bitnet_figure2"):  # Table 3's quantizers are tested below
        found = {row: model.name for row, model in models(paper, name).items() if model.kind == "hub_model"}
        sizes = ["3B"] if name == "bitnet_figure2" else ["700M", "1.3B", "3B"]
        assert found == {
            f"BitNet b1.58, {size} (public checkpoint)": f"hub:1bitLLM/bitnet_b1_58-{file}"
            for size, file in zip(sizes, ["large", "xl", "3B"][-len(sizes) :], strict=True)
        }
        assert not any("public checkpoint" in row for row in models(tiny, name))


def test_low_bit_attention_is_a_setting_of_the_evaluation_and_trains_nothing(tiny):
    found = jobs(tiny, "bitnet_table3")
    for (row, _), job in found.items():
        bits = job.kv_cache and (job.kv_cache["q_bits"], job.kv_cache["kv_bits"], job.kv_cache["first_bits"])
        wanted = {"BitNet": None, "w/ 4-bit KV": (16, 4, 4), "w/ 4-bit QKV": (4, 4, 4), "w/ 4-bit Q,": (4, 3, 4)}
        (expected,) = (value for start, value in wanted.items() if row.startswith(start))
        assert bits == ((4, 3, 3) if "position 0 too" in row else expected), row
        assert (job.kv_cache or {}).get("mapping", "symmetric") == ("minmax" if "other mapping" in row else "symmetric")
    assert len({job.of.job_id for job in found.values()}) == 2, "one model of 3B, one of 7B"


def test_table_3s_quantizers_meet_a_public_model_at_scale_paper(paper):
    found = jobs(paper, "bitnet_table3")
    public = [job for (row, column), job in found.items() if "public" in row and column == "PPL"]
    assert {job.of.name for job in public} == {"hub:1bitLLM/bitnet_b1_58-3B"}
    cells = [job.kv_cache and (job.kv_cache["q_bits"], job.kv_cache["kv_bits"]) for job in public]
    assert cells == [None, (16, 4), (4, 4), (4, 3)]


def test_an_exhibit_that_a_large_proxy_would_keep_waiting_has_a_smaller_one_that_says_so():
    project = Project({"scale": "gpu"})
    for name in ("bitnet_table4", "bitnet_figure6"):
        trained = [[job, *job.ancestors()][-1] for job in jobs(project, name).values()]
        assert {run.hidden_size for run in trained} == {256}
        assert "a proxy of bitnet_3B: the shape of P0" in proxies(project, name)
    assert "a proxy of bitnet_1.3B: the shape of P0" in proxies(project, "bitnet_figure5")
    assert {"a proxy of bitnet_3B: the shape of P0", "a proxy of bitnet_7B: the shape of P2"} <= {
        line.split(", n_layers")[0] for line in proxies(project, "bitnet_table3")
    }
    one, six = jobs(project, "bitnet_figure4"), jobs(project, "bitnet_figure6")
    assert {job.job_id for job in one.values()} & {job.job_id for job in six.values()}, "the hybrid is trained once"


@pytest.mark.parametrize("changed, says", [
    ({"bitnet_tabel4": {"bitnet_3B": {"size": "bitnet_700M", "why": "shorter"}}}, "did you mean 'bitnet_table4'"),
    ({"bitnet_table4": {"bitnet_3B": {"size": "bitnet_70M", "why": "shorter"}}}, "did you mean 'bitnet_700M'"),
    ({"bitnet_table4": {"bitnet_1.3B": {"size": "bitnet_700M", "why": "shorter"}}}, "no cell asks for 'bitnet_1.3B'"),
])  # fmt: skip
def test_a_smaller_size_for_an_exhibit_that_does_not_ask_for_one_is_refused(tmp_path, changed, says):
    root = edited(tmp_path, "bitnet", lambda paper: paper["scales"]["gpu"].update(instead_of_sizes=changed))
    with pytest.raises(SpecError, match=says):
        open_project({"scale": "gpu"}, root).cells("bitnet_table4")


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_rows_of_small_models_say_that_they_are_proxies_and_of_what(scale):
    project = Project({"scale": scale})
    lines = proxies(project, "bitnet_table1")
    for size, shape in zip(("700M", "1.3B", "3B", "7B"), ("P0", "P1", "P2", "P2"), strict=True):
        wanted = f"a proxy of bitnet_{size}: " + (f"the shape of {shape}" if scale == "gpu" else "hidden_size ")
        assert any(line.startswith(wanted) for line in lines), lines
    trained = [(m.hidden_size, m.n_layers) for row, m in models(project).items() if row.startswith("LLaMA")]
    assert len(set(trained)) == 4, "sizes that are trained are four"


def test_the_models_of_scale_tiny_have_the_papers_depth_and_grow_as_its_sizes_do(tiny):
    found = models(tiny)
    shapes = [found[f"LLaMA LLM, {size}"] for size in ("700M", "1.3B", "3B", "7B")]
    assert [shape.n_layers for shape in shapes] == [24, 24, 26, 32]
    assert (np.diff([shape.hidden_size for shape in shapes]) > 0).all()
