rule prepare_data:
    "Tokenize a dataset once; every run of the scale shares the shards."
    output:
        "results/data/{data}/manifest.json",
    log:
        "logs/data/{data}.log",
    resources:
        mem_mb=project.scale.resources.prepare.mem_mb,
        runtime=project.scale.resources.prepare.runtime,
    params:
        settings=data_json,
        local=project.config.local_data,
    shell:
        "python -m paperlm prepare-data --settings {params.settings:q} --local-data={params.local:q}"
        " --out $(dirname {output:q}) > {log:q} 2>&1"
