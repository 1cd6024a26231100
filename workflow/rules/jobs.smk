# One rule text for every kind of job (src/paperlm/jobs/<kind>.py) of which this project has something to make. A record
# is the declared result, and the manifest of the model if the kind leaves one; unfinished work is no output, so that a
# killed job keeps its checkpoints. A job of several GPUs has a process for each, on one machine.
for kind, cls in plan.kinds.items():

    rule:
        name:
            kind
        input:
            data=data_of_job,
            models=models_of_job,
        output:
            **({"model": f"results/{SCALE}/models/{{job}}/manifest.json"} if cls.leaves_model else {}),
            record=f"results/{SCALE}/{kind}/{{job}}.json",
        log:
            f"logs/{SCALE}/{kind}/{{job}}.log",
        wildcard_constraints:
            job=plan.pattern(kind),
        priority: cls.priority
        threads: job_threads if cls.on_card else 1
        resources:
            **({"nodes": 1} if cls.distributed else {}),
            gpu=job_gpus if cls.on_card else 0,
            mem_mb=job_memory,
            runtime=job_minutes,
        params:
            start=started_by if cls.distributed and project.scale.device == "gpu" else "python",
            job=job_settings,
            keep=job_keep,
            rules=job_rules,
            scale=SCALE,
            device=DEVICE if cls.on_card else "cpu",
        shell:
            "{params.start} -m paperlm run --job {params.job:q} --scale {params.scale} --keep={params.keep:q}"
            " --device {params.device} > {log:q} 2>&1"
