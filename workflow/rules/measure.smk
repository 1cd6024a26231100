rule measure:
    "Time, memory and error of every method that a table asks for, on one case; each method in a process of its own."
    output:
        f"results/{SCALE}/bench/{{op}}/{{case}}.jsonl",
    log:
        f"logs/{SCALE}/bench/{{op}}-{{case}}.log",
    threads: card_threads()
    resources:
        gpu=project.scale.resources.gpus.value,
        mem_mb=project.scale.resources.default.mem_mb,
        runtime=project.scale.resources.default.runtime,
    params:
        methods=methods_of_case,
        device=DEVICE,
        size=project.scale.benchmarks,
    shell:
        "python -m paperlm measure {wildcards.op} --case {wildcards.case} --methods={params.methods:q}"
        " --device {params.device} --size {params.size} --out {output:q} > {log:q} 2>&1"
