"""Areas of the code in which mutants are made, and which tests are nearest to each."""

from __future__ import annotations

from typing import NamedTuple

CLAIMS = "src/paperlm/tables/claims"


class Area(NamedTuple):
    """Modules that are mutated; the tests nearest to them; those that are asked when these find nothing."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    further: tuple[str, ...]
    variables: dict[str, str] = {}


def modules(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


AREAS = {
    "verdicts": Area(
        (*modules("src/paperlm/tables", "verdicts"), f"{CLAIMS}/*.py"),
        ("claim_language", "divergence", "paired", "results", "judge"),
        ("values", "published", "tables", "evidence", "bad_input"),
    ),
    "diff": Area(
        modules("src/paperlm/tables", "results", "contents", "jobs", "build", "metrics", "needs"),
        ("results", "published", "show"),
        ("paired", "tables", "evidence", "cce_tables", "results_page", "bad_input", "norm_exhibits"),
    ),
    "published numbers": Area(
        modules("src/paperlm/tables", "published", "consistency", "arithmetic"),
        ("published", "consistency"),
        ("values", "cce_memory", "tables", "bad_input", "damage"),
    ),
    "plan and ids": Area(
        (
            *modules("src/paperlm/plan", "state", "workflow", "project", "estimate", "names", "exhibit", "table"),
            *modules("src/paperlm", "jobs/base", "frozen"),
        ),
        ("digest", "plan_mistakes", "state"),
        (
            "plan",
            "paired",
            "jobs",
            "paper_files",
            "estimate",
            "bad_input",
            "workflow",
            "run",
            "run_killed",
            "norm_exhibits",
        ),
    ),
    "schedule": Area(
        modules("src/paperlm/train", "schedule"), ("schedule",), ("training_settings", "engine", "continue_pretrain")
    ),
    "settings": Area(
        modules("src/paperlm", "plan/resolve", "plan/scale", "tables/settings", "finetune/settings", "data/settings"),
        ("plan_mistakes", "finetune_settings", "plan"),
        ("jobs", "paper_files", "show", "data", "bad_input", "tables", "bitnet_exhibits", "bitnet_proxies", "finetune"),
    ),
    "perplexity": Area(
        modules("src/paperlm", "evaluate/perplexity", "evaluate/windows", "jobs/text_perplexity", "data/chunks"),
        ("text_perplexity", "losses"),
        ("stored_jobs", "engine"),
    ),
    "data": Area(
        modules("src/paperlm/data", "shards", "prepare", "texts", "tokenizer", "items", "bundle", "sources"),
        ("tokenizers", "data", "items"),
        ("wikitext", "hub_model", "images", "bad_input", "damage"),
    ),
    "norms": Area(("src/paperlm/norms/*.py",), ("norms",), ("values", "schedule", "model", "fused_norms")),
    "checkpoints": Area(
        modules("src/paperlm", "train/checkpoint", "models/folder", "record/model_store"),
        ("model_folder", "run", "run_killed"),
        ("values", "damage", "engine_resume", "continue_pretrain", "generation"),
    ),
    "filter": Area(
        modules("kernels/paperlm_kernels/cross_entropy", "liveness", "order", "options"),
        ("cross_entropy_tiles",),
        ("cross_entropy_api", "cross_entropy_order", "cross_entropy_filter", "cross_entropy_kernels"),
        {"TRITON_INTERPRET": "1"},
    ),
    "reference of the loss": Area(
        modules("kernels/paperlm_kernels/cross_entropy", "reference"),
        ("cross_entropy", "cross_entropy_filter"),
        ("cross_entropy_parallel", "cross_entropy_memory", "cross_entropy_compile", "losses"),
    ),
}
