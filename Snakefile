# Table of contents: configuration, rules, targets. `snakemake paper_tables/<table>.csv --cores 8` makes one table.
from snakemake.utils import min_version

min_version("9.0")


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/jobs.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/exhibits.smk"


rule all:
    "Every table and figure at the configured scale."
    default_target: True
    input:
        targets(),
        CONSISTENCY,


for paper, spec in project.papers.items():

    rule:
        name:
            paper
        input:
            targets(*spec.exhibits()),
            CONSISTENCY,


refuse_unknown_targets()


onstart:
    lift_default_rate()


onsuccess:
    show_summary()
