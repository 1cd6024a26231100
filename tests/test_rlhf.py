"""Reward models and policy optimization by trl: pairs, scores, the unit of rewards, and that policies learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import job_environment
from support_finetune import (
    CPU,
    inputs,
    killed,
    preference_items,
    reward_model,
    rloo,
    weights,
    write_model,
    write_set,
)

from paperlm.errors import DataError, Interrupted, JobError
from paperlm.finetune import examples, measure
from paperlm.finetune.examples import Example, Pair
from paperlm.finetune.policy import HeldOut, Reward
from paperlm.jobs import job_kinds, run_job
from paperlm.jobs.base import Machine, parent_kinds
from paperlm.jobs.reward_model import _accuracy
from paperlm.jobs.reward_model import reward_model as fresh_reward_model
from paperlm.jobs.rloo import _order
from paperlm.models.folder import load_model, load_tokenizer, transformers_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return transformers_tokenizer("bpe1024", 128)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return write_set(folder, train=preference_items(40), validation=preference_items(12, start=100))


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory, policy, data):
    """A trained reward model: result, folder."""
    folder = tmp_path_factory.mktemp("reward")
    return run_job(reward_model(), inputs(folder, data, of=policy), CPU), folder / "model"


def models(policy, rewarded, **more):
    return {"of": policy, "reward": rewarded[1], "baseline": policy} | more


@pytest.fixture(scope="module")
def optimized(tmp_path_factory, policy, data, rewarded):
    folder = tmp_path_factory.mktemp("optimized")
    return run_job(rloo(), inputs(folder, data, **models(policy, rewarded)), CPU), folder / "model"


def same_numbers(result, folder, other, other_folder):
    assert (result.metrics, result.series) == (other.metrics, other.series)
    mine = weights(folder)
    assert all(torch.equal(mine[name], tensor) for name, tensor in weights(other_folder).items())


# -- pairs --


def test_a_pair_with_a_prompt_becomes_a_dialogue_with_answers_behind_a_space():
    item = {"prompt": " Hi \n", "chosen": "yes\n", "rejected": "no"}
    assert examples.pairs([("x", item)]) == [Pair("\n\nHuman: Hi\n\nAssistant:", " yes", " no")]


def test_two_whole_dialogues_are_split_where_their_shared_turns_end():
    turns = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    item = {"chosen": f"{turns} Well, yes.", "rejected": f"{turns} Well, no."}  # the answers begin alike
    assert examples.pairs([("x", item)]) == [Pair(turns, " Well, yes.", " Well, no.")]


def test_the_last_of_a_list_of_messages_is_the_answer():
    asked = {"role": "user", "content": "Hi"}
    item = {"prompt": "Hi"} | {
        name: [asked, {"role": "assistant", "content": text}] for name, text in (("chosen", "yes"), ("rejected", "no"))
    }
    assert examples.pairs([("x", item)]) == [Pair("\n\nHuman: Hi\n\nAssistant:", " yes", " no")]


def test_pairs_that_share_their_prompts_are_not_held_out_from_one_split():
    for job in (reward_model, rloo):
        with pytest.raises(ValueError, match="validation_split has to differ"):
            job(validation_split="train")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, "field 'rejected' is missing"),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, "field 'rejected' is empty"),
        ({"prompt": "p", "chosen": "a", "rejected": " a\n"}, "answers are equal|answer are equal"),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant:", "rejected": "\n\nHuman: q\n\nAssistant: a"},
            "chosen answer is empty",
        ),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: r\n\nAssistant: a"}, "share no turn"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "field 'prompt' is no text"),
    ],
)
def test_a_bad_pair_is_named_with_file_and_line_before_training(tmp_path, policy, item, message):
    data = write_set(tmp_path, train=[*preference_items(2), item], validation=preference_items(2))
    with pytest.raises(DataError, match=rf"train\.jsonl, line 3: .*({message})"):
        run_job(reward_model(), inputs(tmp_path / "job", data, of=policy), CPU)


def test_pairs_with_long_prompts_or_answers_equal_after_the_cut_are_left_out(tokenizer):
    found = [
        Pair("\n\nHuman: x\n\nAssistant:", " one two three four five", " one two three four six"),
        Pair("\n\nHuman: " + "long " * 30 + "\n\nAssistant:", " a", " b"),
        Pair("\n\nHuman: y\n\nAssistant:", " a", " b"),
    ]
    kept, left_out = examples.encode_pairs(tokenizer, found, 24, 4)
    assert left_out == 2
    ((chosen, rejected),) = kept
    assert tokenizer.decode(chosen.ids) == f"{found[2].prompt} a{tokenizer.eos_token}"
    assert chosen.ids[: chosen.answer] == rejected.ids[: rejected.answer] == examples.encode(tokenizer, found[2].prompt)


# -- reward models --


def test_the_kinds_name_their_parents_and_the_judge_may_be_absent():
    assert parent_kinds(job_kinds()["reward_model"]) == {"of": ("sft", "pretrain")}
    assert parent_kinds(job_kinds()["rloo"]) == {
        "of": ("sft",),
        "reward": ("reward_model",),
        "baseline": ("sft",),
        "judge": ("reward_model",),
    }
    alone, judged = rloo(), rloo(judge=reward_model(seed=9))
    assert set(alone.parents()) == {"of", "reward", "baseline"}
    assert "judge" not in alone.canonical()
    assert set(judged.parents()) == {"of", "reward", "baseline", "judge"}
    assert alone.job_id != judged.job_id


def test_a_fresh_reward_model_is_the_language_model_with_a_seeded_head(policy, tokenizer):
    one, same, other = (fresh_reward_model(policy, tokenizer, seed) for seed in (3, 3, 4))
    assert torch.equal(one.score.weight, same.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    body = load_model(policy).base_model.state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in one.base_model.state_dict().items())


def test_a_reward_model_learns_to_prefer_and_its_accuracy_is_that_of_its_scores(rewarded, data, tokenizer):
    result, folder = rewarded
    assert result.outcome == "trained"
    assert result.metrics["accuracy"] >= 0.9
    model = load_model(folder, "sequence").double()
    found = examples.pairs(examples.placed_items(data, "validation"))
    pairs, _ = examples.encode_pairs(load_tokenizer(folder), found, 24, 12)
    with torch.no_grad():
        score = [[float(model(input_ids=torch.tensor([e.ids])).logits[0, 0]) for e in pair] for pair in pairs]
    margin = [chosen - rejected for chosen, rejected in score]
    assert result.metrics["accuracy"] == np.mean([m > 0 for m in margin])
    assert result.metrics["margin"] == pytest.approx(np.mean(margin), rel=1e-4)
    assert result.metrics["loss"] == pytest.approx(np.mean([math.log1p(math.exp(-m)) for m in margin]), rel=1e-4)
    assert result.standard_errors["margin"] == pytest.approx(np.std(margin, ddof=1) / math.sqrt(12), rel=1e-3)


def test_labels_turned_around_turn_the_preference_around(tmp_path, policy):
    turned = [{"prompt": i["prompt"], "chosen": i["rejected"], "rejected": i["chosen"]} for i in preference_items(40)]
    data = write_set(tmp_path, train=turned, validation=preference_items(12, start=100))
    assert run_job(reward_model(), inputs(tmp_path / "job", data, of=policy), CPU).metrics["accuracy"] <= 0.1


def test_held_out_prompts_that_were_trained_on_are_labelled(tmp_path, policy):
    data = write_set(tmp_path, train=preference_items(8), validation=preference_items(8, start=5))
    result = run_job(reward_model(epochs=1.0), inputs(tmp_path / "job", data, of=policy), CPU)
    assert any("3 of 8 held-out pairs have a prompt" in label for label in result.labels)


def test_scores_do_not_depend_on_the_padding(rewarded):
    model = load_model(rewarded[1], "sequence")
    generator = np.random.default_rng(0)
    rows = [generator.integers(2, 1024, n).tolist() for n in (3, 40, 1, 17) * 20]
    alone = [measure.scores(model, [row], "fp32")[0] for row in rows[:4]]
    assert np.allclose(measure.scores(model, rows, "fp32")[:4], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_killed_reward_model_goes_on_and_ends_in_the_same_bits(rewarded, tmp_path, policy, data):
    given = killed(tmp_path, "reward_model", data, job_environment(), of=policy)
    result = run_job(reward_model(), given, CPU)
    assert result.cost.resumed_from == [6]
    same_numbers(*rewarded, result, given.model)


# -- samples and the unit of rewards --


def test_samples_repeat_with_their_seed_end_at_eos_and_follow_the_distribution(policy, tokenizer):
    model = load_model(policy)
    bias = torch.full((1024,), -50.0)
    bias[7], bias[9], bias[tokenizer.eos_token_id] = math.log(0.5), math.log(0.3), math.log(0.2)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0 + bias)
    options = {"each": 200, "length": 3, "temperature": 1.0, "numerics": "fp32"}
    found = measure.sample(model, tokenizer, [[5, 6], [8]], seed=1, **options)
    assert found == measure.sample(model, tokenizer, [[5, 6], [8]], seed=1, **options)
    assert found != measure.sample(model, tokenizer, [[5, 6], [8]], seed=2, **options)
    assert all(tokenizer.eos_token_id not in row[:-1] and 1 <= len(row) <= 3 for row in found)
    shares = [np.mean([row[0] == token for row in found]) for token in (7, 9, tokenizer.eos_token_id)]
    assert np.allclose(shares, [0.5, 0.3, 0.2], atol=0.08)  # three standard errors of 400 draws
    sharp = measure.sample(model, tokenizer, [[5, 6]], seed=1, **(options | {"length": 1, "temperature": 0.25}))
    assert np.mean([row[0] == 7 for row in sharp]) > 0.8  # 0.5^4 / (0.5^4 + 0.3^4 + 0.2^4) = 0.87


def test_answers_log_probabilities_are_those_of_the_model_alone(policy):
    model = load_model(policy)
    rows = [Example([5, 6, 7, 8], 2), Example([9, 10], 1), Example(list(range(2, 40)), 30)]
    found = measure.answer_log_probs(model, rows, 0.7, "fp32")
    for example, value in zip(rows, found, strict=True):
        ids = torch.tensor([example.ids])
        with torch.no_grad():
            logs = (load_model(policy).double()(ids).logits[0] / 0.7).log_softmax(-1)
        expected = sum(float(logs[i - 1, example.ids[i]]) for i in range(example.answer, len(example.ids)))
        assert value == pytest.approx(expected, rel=1e-5)


def test_rewards_have_mean_zero_and_deviation_one_on_the_samples_that_define_them(policy, rewarded, tokenizer):
    job = rloo(validation_prompts=4, samples=8)
    held_out = HeldOut(job, tokenizer, [f"\n\nHuman: {i}\n\nAssistant:" for i in range(4)])
    baseline = held_out.sample(load_model(policy))
    assert len(baseline) == 32
    reward = Reward(load_model(rewarded[1], "sequence"), tokenizer, baseline, "fp32")
    values = reward.of([e.ids for e in baseline])
    assert values.mean() == pytest.approx(0.0, abs=1e-12)
    assert values.std(ddof=1) == pytest.approx(1.0)
    texts = [tokenizer.decode(e.ids[: e.answer]) for e in baseline]
    assert np.allclose(reward.of_texts(texts, [""] * 32, [e.ids[e.answer :] for e in baseline]), values)


def test_a_reward_model_that_scores_everything_alike_is_refused(policy, rewarded, tokenizer):
    model = load_model(rewarded[1], "sequence")
    torch.nn.init.zeros_(model.score.weight)
    with pytest.raises(JobError, match="no unit for rewards"):
        Reward(model, tokenizer, [Example([5, 6, 7], 1), Example([5, 8], 1)], "fp32")


def test_the_divergence_is_the_policys_log_probability_less_the_references(tokenizer, monkeypatch):
    logs = {"policy": np.array([-1.0, -2.0, -4.0, -3.0]), "reference": np.array([-2.0, -2.5, -4.5, -7.0])}
    monkeypatch.setattr(measure, "answer_log_probs", lambda model, *_: logs[model])
    held_out = HeldOut(rloo(validation_prompts=2, samples=2), tokenizer, ["one", "two"])
    before, after = ([Example([5, 6, *[7] * n], 2) for n in lengths] for lengths in ((1, 2, 3, 4), (2, 4, 6, 9)))
    ((found, errors),) = held_out.compare({}, before, after, "policy", "reference")
    assert found == {"kl": 1.5, "length_before": 2.5, "length_after": 5.25}
    assert errors["kl"] == pytest.approx(0.75), "of the prompts' means, 0.75 and 2.25"


def test_a_pair_whose_answers_score_alike_counts_as_wrong(monkeypatch):
    monkeypatch.setattr(measure, "scores", lambda *_: np.array([2.0, 1.0, 3.0, 3.0, 0.0, 4.0, 5.0, 1.0]))
    found, _ = _accuracy(None, [(Example([1], 0), Example([2], 0))] * 4, "fp32")
    assert (found["accuracy"], found["margin"]) == (0.5, 0.25)


# -- policy optimization --


def test_every_epoch_passes_over_the_prompts_in_an_order_of_its_own():
    job = rloo(batch=2, epochs=3.0, prompts=5)
    prompts = [str(i) for i in range(5)]
    updates = job.updates(5)
    assert updates == 6  # two whole batches an epoch
    rows = [row["prompt"] for row in _order(job, prompts, updates)]
    epochs = [rows[i : i + 4] for i in (0, 4, 8)]
    assert all(len(set(epoch)) == 4 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


LONG = {
    "epochs": 25.0,
    "samples": 8,
    "peak_lr": 3e-2,
    "schedule": "constant",
    "grad_clip": 0.0,
    "validation_prompts": 12,
}
"Fifty updates: enough for this small policy to learn."


@pytest.fixture(scope="module")
def learned(tmp_path_factory, policy, data, rewarded):
    """A policy without KL penalty, judged by a second reward model: result, folder."""
    folder = tmp_path_factory.mktemp("learned")
    assert run_job(reward_model(seed=5), inputs(folder / "judge", data, of=policy), CPU).outcome == "trained"
    job = rloo(judge=reward_model(seed=5), beta=0.0, **LONG)
    given = inputs(folder, data, **models(policy, rewarded, judge=folder / "judge" / "model"))
    return run_job(job, given, CPU), folder / "model"


def test_a_policy_learns_what_is_rewarded_and_its_report_adds_up(learned):
    result, folder = learned
    found, errors = result.metrics, result.standard_errors
    assert found["updates"] == 50
    assert found["reward_before"] == pytest.approx(0.0, abs=1e-12)  # the policy starts from the baseline
    assert found["reward_gain"] == pytest.approx(found["reward_after"] - found["reward_before"])
    assert found["reward_gain"] > 0.5
    assert found["reward_gain"] > 3 * errors["reward_gain"]
    assert found["judge_gain"] > 2 * errors["judge_gain"]
    rows = result.series["reward"].column("reward")
    assert len(rows) == 50
    assert found["final_reward"] == pytest.approx(np.mean(rows[-2:]))  # 5 % of 50 updates, rounded to even
    assert "not on the paper's scale" in result.labels[0]
    assert len(result.labels) == 1
    assert load_tokenizer(folder).padding_side == "right"
    load_model(folder)


@pytest.mark.slow
def test_a_heavy_penalty_holds_the_policy_near_its_start(learned, tmp_path, policy, data, rewarded):
    result = run_job(rloo(beta=10.0, **LONG), inputs(tmp_path, data, **models(policy, rewarded)), CPU)
    assert learned[0].metrics["kl"] > 2.0
    assert abs(result.metrics["kl"]) < 0.1 * learned[0].metrics["kl"]
    assert "no second reward model judges the samples" in result.labels


def test_two_optimizations_are_equal_bit_for_bit(optimized, tmp_path, policy, data, rewarded):
    given = inputs(tmp_path, data, **models(policy, rewarded))
    same_numbers(*optimized, run_job(rloo(), given, CPU), given.model)


@pytest.mark.parametrize("update", [1, 2, 3])  # the second ends the first epoch
def test_a_stopped_optimization_ends_in_the_same_bits(optimized, tmp_path, policy, data, rewarded, update):
    given = inputs(tmp_path, data, **models(policy, rewarded))
    with pytest.raises(Interrupted, match=f"update {update} of 4"):
        run_job(rloo(), given, Machine(device="cpu", progress=False, stop_after=update))
    result = run_job(rloo(), given, CPU)
    assert result.cost.resumed_from == [update]
    same_numbers(*optimized, result, given.model)


def test_a_killed_optimization_goes_on_and_ends_in_the_same_bits(optimized, tmp_path, policy, data, rewarded):
    given = killed(tmp_path, "rloo", data, job_environment(), **models(policy, rewarded))
    result = run_job(rloo(), given, CPU)
    assert result.cost.resumed_from == [2]
    same_numbers(*optimized, result, given.model)


def test_the_micro_batch_of_an_optimization_changes_rounding_only(optimized, tmp_path, policy, data, rewarded):
    given = inputs(tmp_path, data, **models(policy, rewarded))
    result = run_job(rloo(), given, Machine(device="cpu", progress=False, micro_batch=4))
    found, expected = result.series["reward"].column("reward"), optimized[0].series["reward"].column("reward")
    assert np.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("numerics", ["fp32_master", "pure_bf16"])
def test_an_optimization_runs_in_other_numerics(tmp_path, policy, data, rewarded, numerics):
    result = run_job(rloo(numerics=numerics), inputs(tmp_path, data, **models(policy, rewarded)), CPU)
    assert result.outcome == "trained"
    assert all(math.isfinite(value) for value in result.series["reward"].column("reward"))


def test_an_optimization_whose_gradient_is_no_number_ends_without_a_model(tmp_path, policy, data, rewarded):
    given = inputs(tmp_path, data, **models(policy, rewarded))
    result = run_job(rloo(peak_lr=1e30, warmup=0.0, epochs=10.0), given, CPU)
    assert result.outcome == "not_finite"
    assert not list(given.model.iterdir())


def test_too_few_prompts_are_said(tmp_path, policy, data, rewarded):
    given = inputs(tmp_path, data, **models(policy, rewarded))
    with pytest.raises(DataError, match="40 prompts of at most 24 ids, 50 are asked for"):
        run_job(rloo(prompts=50), given, CPU)
    with pytest.raises(DataError, match="3 prompts do not fill a batch of 4"):
        run_job(rloo(prompts=3), given, CPU)
