# Table of contents: configuration, rules, targets. `snakemake paper_tables/<table>.csv --cores 8` makes one table.
from snakemake.utils import min_version

min_version("9.0")


configfile: "config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/pretrain.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/tables.smk"


rule all:
    "Every table and figure at the configured scale."
    default_target: True
    input:
        expand("paper_tables/{table}.csv", table=project.tables),
        expand("paper_tables/{table}.curves.svg", table=RUN_TABLES),
        expand("paper_tables/{figure}.svg", figure=project.figures),


onsuccess:
    show_summary()
