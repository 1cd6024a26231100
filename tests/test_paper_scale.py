"""Jobs of scale paper at their full width, on the meta device: shapes and memory of training, and no numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import torch

from paperlm.jobs import Job
from paperlm.models.llama import PaperLlamaForCausalLM, PaperLlamaForSequenceClassification
from paperlm.models.losses import MATERIALISED
from paperlm.models.sizes import ALL_SIZES
from paperlm.models.vit import PaperViTForImageClassification
from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow
from paperlm.probe.text import root
from paperlm.quantizers.presets import preset_name
from paperlm.train import image_classification, language_model
from paperlm.train.task import start_dtype

GIB = 2**30
BATCH = 8
"Examples of a part of an update, in which an engine takes as many as fit; activations are counted nowhere here."


ALIKE = {
    "seed", "dataset", "tokenizer", "example", "train_examples", "validation_tokens", "global_batch",
    "loss_group", "steps", "eval_every", "curve", "schedule", "peak_lr", "warmup_fraction", "warmup_at_least",
    "final_lr_fraction", "end_lr", "phase_at", "second_peak_lr", "grad_clip", "weight_decay",
    "second_weight_decay", "decay_norms", "adam_betas", "adam_eps", "rms_norm_eps", "rope_theta",
    "initializer_range", "embed_init_std",
}  # fmt: skip
"""Settings of a job that change numbers and how many updates there are: not shapes, dtypes or memory. Whatever is not
here tells two jobs apart, a setting of tomorrow included."""


def told_by(job: Job) -> str:
    """All settings that may change an update on the meta device, of the job and of those that it begins with."""
    values = {name: getattr(job, name) for name in sorted(type(job).model_fields) if name not in ALIKE}
    return repr({name: told_by(v) if isinstance(v, Job) else v for name, v in values.items()})


def flat(value: object) -> list[str]:
    """The values of a method's settings and of the methods that it wraps."""
    return [word for v in value.values() for word in flat(v)] if isinstance(value, dict) else [str(value)]


def readable(job: Job) -> str:
    """Size, method, numerics and optimizer, then whatever else is not as in most jobs."""
    first = root(job)
    parts = [first.size, *flat(first.norm), job.numerics]
    if job is not first:
        parts += ["after", first.numerics]
    parts.append(first.optimizer)
    if first.kind == "pretrain":
        recipe = first.quantization
        preset = preset_name(recipe, first.sub_norm, first.hidden_act) if recipe else None
        parts += [preset or "/".join(place["name"] for place in recipe.values())] if recipe else []
        parts += ["sub_norm"] * first.sub_norm + ["tied"] * first.tie_word_embeddings
        parts += [v for v in (first.hidden_act, first.weights, first.loss) if v not in ("silu", "plain", MATERIALISED)]
    return " ".join(parts)


def by_name(jobs: Iterable[Job]) -> dict[str, Job]:
    """One of all jobs that are told by the same settings, by a readable name."""
    found = list({told_by(job): job for job in jobs}.values())
    named = {readable(job): job for job in found}
    assert len(named) == len(found), "two different jobs have one name: give it the setting that tells them apart"
    return named


@functools.cache
def trained() -> dict[str, Job]:
    """The jobs that scale paper trains a model in, from random weights or on with other quantizers.

    Jobs that differ in `ALIKE` alone, in seeds, data or steps for example, would make the same updates here, so that
    one of them stands for all. Weights in stores lie plain here: how many bytes they take follows from their numbers.
    """
    jobs = Project({"scale": "paper", "run_missing": "yes"}).jobs.values()
    ours = [job for job in jobs if job.kind in ("pretrain", "image_classification")]
    return by_name([*(job.settings() for job in jobs if job.kind == "continue_pretrain"), *ours])


def test_every_training_of_scale_paper_is_among_those_tried_but_for_settings_that_change_numbers_alone():
    tried = {told_by(job) for job in trained().values()}
    for job in Project({"scale": "paper", "run_missing": "yes"}).jobs.values():
        if job.kind in ("pretrain", "image_classification", "continue_pretrain"):
            assert told_by(job.settings() if job.kind == "continue_pretrain" else job) in tried, job.slug()
    descents = {(job.optimizer, job.weights) for job in trained().values() if job.size == "neuzip_13B"}
    assert descents == {("sgd", "raw"), ("lomo", "raw"), ("lomo", "packed")}
    assert {job.numerics for job in trained().values() if job.size == "130M"} == {"pure_bf16", "fp32_master"}


def of_each_size() -> list[str]:
    """One job a size."""
    return list({job.size: name for name, job in trained().items()}.values())


def on_meta(job: Job) -> tuple[torch.nn.Module, tuple[torch.Tensor | str, ...]]:
    """The model without numbers, in the dtype that it trains in, and what the task hands to its loss."""
    with torch.device("meta"):
        if job.kind == "image_classification":
            model = PaperViTForImageClassification(image_classification.config_of(job, [str(i) for i in range(1000)]))
            images = torch.empty(BATCH, model.config.num_channels, model.config.image_size, model.config.image_size)
            batch = images, torch.empty(BATCH, model.config.num_labels)
        else:
            model = PaperLlamaForCausalLM(language_model.config_of(job)).to("meta")  # rotary tables are made on a CPU
            ids = torch.empty(BATCH, job.seq_len, dtype=torch.int64)
            batch = ids, ids, job.loss
    start_dtype(model, job.numerics)
    return model, batch


def train(name: str, updates: int) -> None:
    job = trained()[name]
    model, batch = on_meta(job)
    count = sum(p.numel() for p in model.parameters())
    if (size := ALL_SIZES[job.size]) and job.norm["name"] in ("pre_ln", "post_ln", "mix_ln", "layernorm_scaling"):
        added = size.n_layers * (size.hidden_size + size.intermediate_size) if getattr(job, "sub_norm", False) else 0
        shared = job.vocab_size * size.hidden_size if getattr(job, "tie_word_embeddings", False) else 0
        assert count == size.parameters + added - shared
    name = getattr(job, "optimizer", "adamw")
    # LOMO is descent whose gradients come and go one at a time: here they are all held, which is more
    optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(name, torch.optim.SGD)(
        model.parameters(), lr=1e-3, foreach=True
    )
    moments = 0 if isinstance(optimizer, torch.optim.SGD) else 2
    assert moments or name in ("sgd", "lomo")
    for _ in range(updates):
        model.summed_loss(*batch).backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    state = [s[m] for s in optimizer.state.values() for m in ("exp_avg", "exp_avg_sq") if m in s]
    assert sum(t.numel() for t in state) == moments * count
    width = 2 if job.numerics == "pure_bf16" else 4
    assert {t.element_size() for t in (*model.parameters(), *state)} == {width}
    held = (2 + moments) * count * width  # weights, gradients, moments
    if job.kind == "image_classification" or (job.weights == "plain" and name != "lomo"):
        assert job.card_bytes() == pytest.approx(held, rel=0.01), "what a plan says of each card"
    gib = held / GIB
    assert gib < 141 / 1.074, f"{gib:.0f} GiB of weights, gradients and moments are more than an H200 holds"


@pytest.mark.parametrize("name", of_each_size())
def test_every_size_of_scale_paper_can_be_trained_at_full_width(name):
    train(name, 1)


def updates_of_each(test: Callable) -> Callable:
    """Two of them in a slow test, ten in a long one."""
    return pytest.mark.slow(pytest.mark.parametrize("updates", [2, pytest.param(10, marks=pytest.mark.long)])(test))


@updates_of_each
@pytest.mark.parametrize("name", list(trained()))
def test_the_first_updates_of_every_training_of_scale_paper_have_the_shapes_they_need(name, updates):
    train(name, updates)


# -- behind the pre-training: the update that trl makes, without trl, which asks a tensor for its numbers ----


@functools.cache
def tuned(kind: str) -> dict[str, Job]:
    """The jobs of a kind that trains a model further; one stands for all that differ in `ALIKE` alone."""
    return by_name(job for job in Project({"scale": "paper", "run_missing": "yes"}).jobs.values() if job.kind == kind)


def decoder(job: Job, cls: type = PaperLlamaForCausalLM, **changes: int) -> torch.nn.Module:
    """The model that a job begins with, in the dtype that it keeps its weights in."""
    config = language_model.config_of(root(job))
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = cls(config).to("meta")
    return model.to(torch.bfloat16 if job.numerics == "pure_bf16" else torch.float32)


def updated(job: Job, model: torch.nn.Module, loss: Callable[[], torch.Tensor], updates: int, beside: int = 0) -> None:
    """`updates` of them; weights, gradients, moments and `beside` bytes of other models have to fit on an H200."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.peak_lr, betas=job.adam_betas)
    for _ in range(updates):
        one = loss()
        assert one.shape == () and one.device.type == "meta"
        one.backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    held = 4 * sum(p.numel() * p.element_size() for p in model.parameters()) + beside
    assert job.card_bytes() == pytest.approx(held, rel=0.03), "what a plan says of its card"
    assert held / GIB < 141 / 1.074, f"{held / GIB:.0f} GiB are more than an H200 holds"


@updates_of_each
@pytest.mark.parametrize("name", list(tuned("sft")))
def test_the_first_updates_of_every_fine_tuning_of_scale_paper_have_the_shapes_they_need(name, updates):
    job = tuned("sft")[name]
    model, ids = decoder(job), torch.empty(2, job.block, dtype=torch.int64, device="meta")
    updated(job, model, lambda: model.summed_loss(ids, ids) / ids.numel(), updates)


@updates_of_each
@pytest.mark.parametrize("name", list(tuned("reward_model")))
def test_the_first_updates_of_every_reward_model_of_scale_paper_have_the_shapes_they_need(name, updates):
    job = tuned("reward_model")[name]
    model = decoder(job, PaperLlamaForSequenceClassification, num_labels=1, pad_token_id=0)
    ids = torch.empty(2, job.prompt_length + job.answer_length, dtype=torch.int64, device="meta")

    def loss() -> torch.Tensor:
        chosen, rejected = model.score(model.model.hidden(ids))[:, -1]
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    updated(job, model, loss, updates)


@updates_of_each
@pytest.mark.parametrize("name", list(tuned("rloo")))
def test_the_first_updates_of_every_rlhf_of_scale_paper_have_the_shapes_they_need(name, updates):
    """Beside the policy lie its reference, the reward model, and the judge, all with weights of the same kind."""
    job = tuned("rloo")[name]
    policy, reference = decoder(job), decoder(job)
    ids = torch.empty(2 * job.samples, job.prompt_length + job.answer_length, dtype=torch.int64, device="meta")
    advantages = torch.empty(len(ids), 1, device="meta")

    def likelihoods(model: torch.nn.Module) -> torch.Tensor:
        logits = model.lm_head(model.model.hidden(ids[:, :-1])[:, -job.answer_length :]).float()
        return logits.log_softmax(-1).gather(-1, ids[:, -job.answer_length :, None])[..., 0]

    def loss() -> torch.Tensor:
        mine = likelihoods(policy)
        with torch.no_grad():
            theirs = likelihoods(reference)
        return -(advantages * mine).mean() + job.beta * (mine - theirs).mean()

    one = sum(p.numel() * p.element_size() for p in reference.parameters())
    updated(job, policy, loss, updates, beside=one * (1 + len({"reward", "judge"} & set(job.parents()))))


def card_hours(found, kind: str) -> float:
    """Of all jobs of a kind, had each been made on one card."""
    speed = Project({"scale": "paper"}).scale.resources.speed
    return sum(need.seconds * speed(need.gpus) for need in found.needs if need.kind == kind) / 3600


def test_a_plan_at_scale_paper_names_cards_memory_and_hours_of_every_kind_of_job():
    from paperlm.plan.estimate import estimate, expectation

    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}))
    found = estimate(plan, ["mixln"], "none")
    assert found.most == 8 and max(need.mem_mb for need in found.needs if need.kind == "pretrain") == 320_000
    todo = plan.state.todo(*plan.project.papers["mixln"].exhibits()).values()
    operations = sum(job.flops() for job in todo if job.kind == "pretrain")
    rate = operations / (3600 * card_hours(found, "pretrain"))
    assert 1e14 < rate < 8e14, "between a tenth and the whole of what an H200 reaches"
    lines = expectation(plan, ["mixln"], 8, None).splitlines()
    assert "at the rate that records of scale gpu reached" in lines[0]
    assert {line.split()[1].rstrip(":") for line in lines[1:]} == set(found.kinds)
    (line,) = (line for line in lines if " pretrain of 250M: 2 GPUs each, 48 GB of memory, " in line)
    hours = {need.seconds / 3600 for need in found.needs if (need.kind, need.size) == ("pretrain", "250M")}
    assert f" {max(hours):,.1f} hours each, " in line and "GPU-hours in all" in line
    held = 4 * 2 * ALL_SIZES["250M"].parameters / 1e9  # weights, gradients and two moments, in bfloat16
    assert f"48 GB of memory, at least {held:.1f} GB on each GPU without activations, " in line


def test_what_a_card_holds_is_that_of_the_whole_model_however_many_share_the_work():
    from paperlm.plan.estimate import estimate

    found = estimate(Workflow(Project({"scale": "paper", "run_missing": "yes"})), ["mixln", "bitnet"], "none")
    for need in found.needs:
        assert need.gpus == 0 or need.card_bytes or "qwen" in need.name, need.name
        assert need.card_bytes is None or need.gpus
    largest = max((need for need in found.needs if need.kind == "pretrain"), key=lambda need: need.card_bytes)
    assert largest.size == "bitnet_7B" and largest.gpus == 8
    assert 100e9 < largest.card_bytes < 141e9, "float32 weights, gradients and moments, on each of eight H200"
    assert largest.line().partition(" GB of memory, ")[2].startswith(f"at least {largest.card_bytes / 1e9:.0f} GB on ")
    (removal,) = (need for need in found.needs if need.name.startswith("block_removal-llama-2-7b"))
    assert removal.card_bytes == 4 * 6_738_415_616, "weights alone, in float32"


def test_a_measurement_without_each_block_has_a_fifth_more_time_than_planned():
    from paperlm.plan.estimate import estimate

    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}))
    exhibits = [name for paper in ("mixln", "lns") for name in plan.project.papers[paper].exhibits()]
    jobs = [job for job in plan.state.todo(*exhibits).values() if job.kind == "block_removal"]
    seconds = estimate(plan, ["mixln", "lns"], "none").kinds["block_removal"]
    given = [60 * plan.job_size(job.job_id).runtime for job in jobs]
    assert len(given) == len(seconds) and max(seconds) > 200 * 3600, "13B without each of its 40 blocks"
    assert [job.job_id for job, have, need in zip(jobs, given, seconds, strict=True) if have < 1.2 * need] == []


def test_the_last_twentieth_of_bitnets_trunks_is_planned_at_their_pace_and_in_their_memory():
    from paperlm.plan.estimate import estimate

    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}))
    found = estimate(plan, ["bitnet"], "none")
    todo = plan.state.todo(*plan.project.papers["bitnet"].exhibits()).values()
    branches = [job for job in todo if job.kind == "continue_pretrain"]
    hours = {kind: card_hours(found, kind) for kind in ("pretrain", "continue_pretrain")}
    operations = {kind: sum(job.flops() for job in todo if job.kind == kind) for kind in hours}
    assert hours["continue_pretrain"] / hours["pretrain"] == pytest.approx(
        operations["continue_pretrain"] / operations["pretrain"], rel=1e-6
    )
    assert 15_000 < hours["pretrain"] < 30_000, "the specification counts about 20,000 hours of an H200"
    for job in branches:
        ours, trunk = plan.job_size(job.job_id), plan.job_size(job.of.job_id)
        assert ours.mem_mb >= trunk.mem_mb, "the same weights and optimizer"
        assert 60 * ours.runtime >= 1.2 * found.kinds["continue_pretrain"][branches.index(job)]
        assert ours.gpus.value == trunk.gpus.value, "and the same batch"
    assert len(branches) == 13
