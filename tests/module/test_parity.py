"""Every architecture trains as one graph, for every batch size and length, as eager does."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from tests.breadth import sampled
from tests.models import MODELS, SAMPLE, ModelCase
from tests.module.agreement import (
    DRIFTED,
    GRAPH,
    RELATIVE,
    Outcome,
    assert_agree,
    assert_trained_alike,
    double,
    in_double,
    step,
    vain_elements,
)


@dataclass
class Subject:
    """One architecture as a graph, in eager and in float64, all with the same weights."""

    case: ModelCase
    graph: ORTModule
    eager: nn.Module
    truth: nn.Module

    @classmethod
    def of(cls, case: ModelCase) -> Subject:
        module = case.build()
        module(**case.batch())  # classifiers note the kind of their labels at the first call
        return cls(case, ORTModule(copy.deepcopy(module), options=GRAPH), module, in_double(module))

    def check(self, batch: int, length: int, seed: int = 0, relative: float = RELATIVE) -> Outcome:
        """Compares one step of all three on one batch; returns that of float64."""
        inputs = self.case.batch(batch, max(length, self.case.shortest), seed)
        truth = step(self.truth, double(inputs))
        ours, eager = step(self.graph, inputs), step(self.eager, inputs)
        assert_agree(ours, eager, truth, relative=relative)
        assert self.graph.report.mode == "graph"
        return truth


@pytest.fixture(scope="module", params=sampled(MODELS, SAMPLE))
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject.of(MODELS[request.param])


def test_one_graph_serves_every_batch_size_and_length_but_of_one(subject: Subject) -> None:
    for batch, length in ((3, 7), (2, 9), (4, 5)):
        subject.check(batch, length)
    assert subject.graph.report.captures == 1
    for batch, length in ((1, 5), (4, 1), (1, 1)):
        subject.check(batch, length)


def test_twenty_steps_of_adamw_end_where_eager_ends(subject: Subject) -> None:
    start = copy.deepcopy(subject.truth)
    models = (subject.graph, subject.eager, subject.truth)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    vain: dict[str, torch.Tensor] = {}
    captures: list[int] = []
    for number in range(20):
        truth = subject.check(3 - number % 2, 7 - number % 3, number % 4, relative=DRIFTED)
        for name, elements in vain_elements(truth).items():
            vain[name] = vain.get(name, elements) | elements
        for optimizer in optimizers:
            optimizer.step()
        captures.append(subject.graph.report.captures)
    assert_trained_alike(subject.graph, subject.truth, start, vain)
    assert len({*captures}) == 1


@pytest.mark.parametrize("name", sampled(MODELS, {*SAMPLE} - {"t5"}))
def test_behind_a_first_batch_of_one_a_second_graph_serves_all_sizes(name: str) -> None:
    subject = Subject.of(MODELS[name])
    for batch, length in ((1, 1), (3, 7), (2, 5)):
        subject.check(batch, length)
    assert subject.graph.report.captures == 2


@pytest.mark.parametrize("part", ["loss", "gradient", "buffer", "missing gradient"])
def test_the_comparison_notices_a_thousandth(part: str) -> None:
    case = MODELS["cnn"]
    eager = case.build()
    truth = in_double(eager)
    inputs = case.batch()
    theirs, exact = step(eager, inputs), step(truth, double(inputs))
    ours = copy.deepcopy(theirs)
    assert_agree(ours, theirs, exact)
    if part == "loss":
        ours.loss *= 1.001
    elif part == "gradient":
        gradient = ours.gradients["head.weight"]
        assert gradient is not None
        gradient *= 1.001
    elif part == "buffer":
        ours.buffers["body.1.running_var"] *= 1.001
    else:
        ours.gradients["head.weight"] = None
    with pytest.raises(AssertionError):
        assert_agree(ours, theirs, exact)
