rule pretrain:
    "Train one language model; the record is its only declared result, so a killed job keeps its checkpoints."
    input:
        data_of_run,
    output:
        f"results/{SCALE}/runs/{{run}}.json",
    log:
        f"logs/{SCALE}/{{run}}.log",
    benchmark:
        f"results/{SCALE}/benchmarks/{{run}}.tsv"
    threads: jobs.threads_per_run(workflow.resource_settings.cores if workflow.is_main_process else None)
    resources:
        gpu=project.scale.resources.gpus,
        mem_mb=run_memory,
        runtime=run_minutes,
    params:
        run=run_json,
        checkpoints=f"results/{SCALE}/checkpoints/{{run}}",
        model=f"results/{SCALE}/models/{{run}}",
        seconds=project.config.checkpoint_seconds,
        exact_loss=exact_loss,
    shell:
        "python -m paperlm pretrain --settings {params.run:q} --data {input:q} --out {output:q} --model {params.model:q}"
        " --checkpoints {params.checkpoints:q} --checkpoint-seconds {params.seconds} --exact-loss {params.exact_loss}"
        " > {log:q} 2>&1"


rule probe_ranks:
    "Softmax probabilities of a trained model by rank; its record stands for the model, which the job above left behind."
    input:
        record=f"results/{SCALE}/runs/{{run}}.json",
        data=data_of_run,
    output:
        f"results/{SCALE}/ranks/{{run}}.json",
    log:
        f"logs/{SCALE}/ranks/{{run}}.log",
    wildcard_constraints:
        run="|".join(project.runs),
    threads: jobs.threads_per_run(workflow.resource_settings.cores if workflow.is_main_process else None)
    resources:
        gpu=project.scale.resources.gpus,
        mem_mb=run_memory,
        runtime=project.scale.resources.prepare.runtime,
    params:
        run=run_json,
        model=f"results/{SCALE}/models/{{run}}",
        device="cuda" if project.scale.device == "gpu" else "cpu",
    shell:
        "python -m paperlm probe-ranks --settings {params.run:q} --data {input.data:q} --model {params.model:q}"
        " --device {params.device} --out {output:q} > {log:q} 2>&1"
