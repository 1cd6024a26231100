CONSISTENCY = "paper_tables/published_consistency.csv"


localrules:
    all,
    published_consistency,
    table,
    curves,
    figure,
    judged_figure,


rule table:
    "Regenerated table, its diff against the published one, and the verdicts on its claims."
    input:
        records=inputs_of_table,
        again=again_of_exhibit,
        published=published_of_table,
    output:
        table=report(
            "paper_tables/{table}.csv",
            caption="../report/table.rst",
            category="Tables as CSV",
            labels={"table": "{table}", "file": "regenerated"},
        ),
        diff=report(
            "paper_tables/{table}.diff.csv",
            caption="../report/diff.rst",
            category="Tables as CSV",
            labels={"table": "{table}", "file": "diff"},
        ),
        claims=report(
            "paper_tables/{table}.claims.csv",
            caption="../report/claims.rst",
            category="Tables as CSV",
            labels={"table": "{table}", "file": "claims"},
        ),
        notes="paper_tables/{table}.notes.txt",
        page=report(
            "results/report/{table}.html",
            caption="../report/page.rst",
            category="Tables",
            labels={"table": "{table}", "file": "table, diff and claims"},
        ),
    log:
        "logs/tables/{table}.log",
    params:
        config=exhibit_config,
        digest=exhibit_digest,
    shell:
        "python -m paperlm table {wildcards.table} --config-json {params.config:q} --out {output.table:q}"
        " --html $(dirname {output.page:q}) --records {input.records:q} > {log:q} 2>&1"


rule curves:
    "Training curves behind a table, and their numbers."
    input:
        records=inputs_of_table,
        again=again_of_exhibit,
    output:
        figure=report(
            "paper_tables/{table}.curves.svg",
            caption="../report/curves.rst",
            category="Figures",
            labels={"table": "{table}", "file": "training curves"},
        ),
        image="paper_tables/{table}.curves.png",
        notes="paper_tables/{table}.curves.notes.txt",
        numbers="paper_tables/{table}.curves.csv",
    log:
        "logs/tables/{table}.curves.log",
    wildcard_constraints:
        table="|".join(plan.curves) or NOTHING,
    params:
        config=exhibit_config,
        digest=exhibit_digest,
    shell:
        "python -m paperlm curves {wildcards.table} --config-json {params.config:q} --out {output.figure:q}"
        " --records {input.records:q} > {log:q} 2>&1"


rule figure:
    "A figure of a paper, and its numbers."
    input:
        records=inputs_of_figure,
        again=again_of_exhibit,
    output:
        figure=report(
            "paper_tables/{figure}.svg",
            caption="../report/figure.rst",
            category="Figures",
            labels={"table": "{figure}", "file": "figure"},
        ),
        image="paper_tables/{figure}.png",
        notes="paper_tables/{figure}.notes.txt",
        numbers="paper_tables/{figure}.csv",
    log:
        "logs/tables/{figure}.log",
    wildcard_constraints:
        figure="|".join(name for name in project.figures if not plan.has_claims(name)) or NOTHING,
    params:
        config=exhibit_config,
        digest=exhibit_digest,
    shell:
        "python -m paperlm figure {wildcards.figure} --config-json {params.config:q} --out {output.figure:q}"
        " --records {input.records:q} > {log:q} 2>&1"


use rule figure as judged_figure with:
    output:
        figure=report(
            "paper_tables/{figure}.svg",
            caption="../report/figure.rst",
            category="Figures",
            labels={"table": "{figure}", "file": "figure"},
        ),
        image="paper_tables/{figure}.png",
        notes="paper_tables/{figure}.notes.txt",
        numbers="paper_tables/{figure}.csv",
        diff=report(
            "paper_tables/{figure}.diff.csv",
            caption="../report/diff.rst",
            category="Figures",
            labels={"table": "{figure}", "file": "diff"},
        ),
        claims=report(
            "paper_tables/{figure}.claims.csv",
            caption="../report/claims.rst",
            category="Figures",
            labels={"table": "{figure}", "file": "claims"},
        ),
    wildcard_constraints:
        figure="|".join(filter(plan.has_claims, project.figures)) or NOTHING,


rule published_consistency:
    "Printed numbers against each other: averages, cells printed twice, arithmetic."
    input:
        printed=published_of_all,
    output:
        CONSISTENCY,
    log:
        "logs/tables/published_consistency.log",
    params:
        checks=consistency_digest,
        config=editions,
    shell:
        "python -m paperlm consistency --config-json {params.config:q} --out {output:q} > {log:q} 2>&1"
