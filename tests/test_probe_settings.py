"""Jobs that look into a model: what they read, what is part of their names, and which settings are refused."""

import json

import pytest
from pydantic import ValidationError
from support_probe import FineTuned, Pretrained
from support_probe_settings import HUB, OWN_TEXT, TASK, job_of, kinds

from paperlm.jobs import job_from
from paperlm.jobs.angular_distance import AngularDistance
from paperlm.jobs.block_removal import BlockRemoval
from paperlm.jobs.hub_model import HubModel
from paperlm.jobs.output_variance import OutputVariance


@kinds
def test_a_job_reads_the_validation_tokens_of_the_pre_training_at_the_start_of_its_chain(kind):
    tuned = FineTuned(of=Pretrained(seed=3))
    assert job_of(kind, of=tuned).data() == [Pretrained().token_data()]
    assert job_of(kind, of=tuned).job_id.startswith(f"{kind.kind}-sft-toy-s3-")


@kinds
def test_a_state_of_training_is_part_of_the_name(kind):
    names = {at: job_of(kind, at=at).job_id for at in ("end", "init", 0, 40)}
    assert len(set(names.values())) == 4
    assert names["end"] == job_of(kind).job_id and "-at_40-" in names[40]
    assert [job_of(kind, at=at).snapshot("of") for at in names] == [None, 0, 0, 40]


@kinds
def test_a_model_of_ours_reads_another_text_where_the_job_names_one(kind):
    job = job_of(kind, **OWN_TEXT)
    assert [one.dataset for one in job.data()] == [OWN_TEXT["text"]]
    assert job.job_id != job_of(kind).job_id


WRONG = [
    ({"at": 100}, r"at: 100: a job of kind 'pretrain' has states 0 to 99 beside its end"),
    ({"at": -1}, r"has states 0 to 99"),
    ({"of": FineTuned(of=Pretrained()), "at": "init"}, r"kind 'sft' has no other state beside its end"),
    ({"text": "bundled:c4_sample"}, r"text and text_tokens go together: set both, or neither"),
    ({"text_tokens": 8}, r"text and text_tokens go together: set both, or neither"),
    ({"of": HubModel(name=HUB)}, r"say what a hub_model reads: set both"),
    ({"of": HubModel(name=HUB), "text": "bundled:c4_sample"}, r"say what a hub_model reads: set both"),
    (
        {"of": AngularDistance(of=Pretrained())},
        r"it has to be of kind pretrain or continue_pretrain or sft or rloo or hub_model",
    ),
]


@kinds
@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_settings_that_do_not_fit_the_model_are_refused(kind, settings, message):
    with pytest.raises(ValidationError, match=message):
        job_of(kind, **settings)


def test_an_unknown_text_is_refused_with_the_nearest_name():
    with pytest.raises(ValidationError, match=r"unknown dataset 'c4_sampel'; did you mean 'c4_sample'"):
        job_of(OutputVariance, of=HubModel(name=HUB), text="bundled:c4_sampel", text_tokens=8)


UNFIT = [
    ({"source": "bundled"}, "source: without a task"),
    ({"few_shot": 2}, "few_shot: without a task"),
    (TASK | {"task": "arc_eazy"}, "did you mean 'arc_easy'"),
    (TASK | {"source": None}, "source"),
    (TASK | {"max_length": None}, "max_length"),
]


@pytest.mark.parametrize(("settings", "message"), UNFIT)
def test_a_task_is_named_with_what_it_needs_or_not_at_all(settings, message):
    if "task" in settings:
        pytest.importorskip("paperlm.jobs.lm_eval")
    with pytest.raises(ValidationError, match=message):
        job_of(BlockRemoval, **settings)


def test_the_task_is_part_of_the_name():
    pytest.importorskip("paperlm.jobs.lm_eval")
    jobs = [job_of(BlockRemoval, **settings) for settings in ({}, TASK, TASK | {"items": 12}, TASK | {"few_shot": 1})]
    assert len({job.job_id for job in jobs}) == 4
    assert jobs[1].slug() == "block_removal-toy-s0-arc_easy"


@kinds
def test_a_job_survives_json_with_its_name(kind):
    job = job_of(kind, of=HubModel(name=HUB), **OWN_TEXT)
    again = job_from(json.loads(json.dumps(job.canonical())))
    assert again == job and again.job_id == job.job_id
