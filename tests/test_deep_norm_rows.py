"""DeepNorm in the tables: with the constants of the authors' code, and beside it with those of its own paper."""

from __future__ import annotations

import itertools

import pytest
from support_tables import write_records

from paperlm.plan.project import Project
from paperlm.tables.build import table_contents
from paperlm.tables.verdicts import claim_rows

TABLE = "mixln_table1"
TABLES = (TABLE, "mixln_table2", "lns_table1", "lns_table3")


def test_every_row_of_deep_norm_has_the_authors_constants_and_one_beside_it_the_published_ones():
    """At scale smoke, which shows that everything runs, the first alone."""
    for scale, name in itertools.product(("smoke", "tiny", "gpu", "paper"), TABLES):
        cells = [c for c in Project({"scale": scale}).cells(name) if c.jobs and "DeepNorm" in c.row]
        rows = {c.row: (c.jobs[0] if c.jobs[0].kind == "pretrain" else c.jobs[0].of.of).norm["preset"] for c in cells}
        defined = {row for row in rows if "as defined" in row}
        beside = set() if scale == "smoke" else set(rows) - defined
        assert {row.replace(" (as defined)", "") for row in defined} == beside
        assert all(rows[row] == ("correct" if row in defined else "authors_public") for row in rows)


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_deep_norms_published_constants_are_a_row_of_their_own_and_claims_of_ours_read_it(tmp_path, scale):
    project = Project({"scale": scale})
    better = lambda r, c, s: 20.0 if r == "DeepNorm (as defined)" else 25.0 if r == "Mix-LN" else 30.0  # noqa: E731
    contents = table_contents(project, TABLE, write_records(project, tmp_path, better))
    rows = {(row["claim"], row["part"]): row for row in claim_rows(project, TABLE, contents)}
    assert rows["MIX-T1-1", "LLaMA-130M"]["verdict"] != "fails"
    assert rows["MIX-T1-1d", "LLaMA-130M"]["verdict"] == rows["MIX-T1-5d", "LLaMA-130M"]["verdict"] == "fails"
