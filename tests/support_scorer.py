"""A model of lm-evaluation-harness that reads nothing: each option has the value of a rule."""

from __future__ import annotations

from lm_eval.api.model import LM


class Scorer(LM):
    """Gives each option the value of a rule and keeps what it was asked."""

    def __init__(self, rule):
        super().__init__()
        self.rule, self.asked = rule, []

    def loglikelihood(self, requests, disable_tqdm=False):
        self.asked += [(request.task_name, request.doc_id, request.idx, *request.args) for request in requests]
        return [(self.rule(request), False) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError
