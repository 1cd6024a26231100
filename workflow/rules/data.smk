rule prepare_data:
    "Prepare a data set once: tokenize a text, or lay out items or images; every job of every scale shares it."
    output:
        "results/data/{data}/manifest.json",
    log:
        "logs/data/{data}.log",
    resources:
        mem_mb=project.scale.resources.prepare.mem_mb,
        runtime=project.scale.resources.prepare.runtime,
    params:
        settings=data_settings,
    shell:
        "python -m paperlm prepare-data --settings {params.settings:q} --out $(dirname {output:q}) > {log:q} 2>&1"
