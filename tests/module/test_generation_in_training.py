"""Models that generate between two steps of a training, in every precision, and train on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ortrain import Options, ORTModule
from ortrain.deploy.generation import ORTGenerator
from tests.breadth import sampled
from tests.models import MODELS
from tests.module.agreement import loss_of
from tests.module.test_precisions import PRECISIONS

SEARCHES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "top_k": 20, "temperature": 1.5},
    {"num_beams": 3, "do_sample": True},
)
CASES = [
    f"{model}, {precision}, {engine}"
    for model in ("gpt2", "bloom", "llama", "bart", "t5")
    for precision in PRECISIONS
    if PRECISIONS[precision].place != "forward"  # whose wrapper has no generate
    for engine in ("onnxruntime", "aten")
    if engine == "aten" or precision == "float32"
]
SAMPLE = ["gpt2, float32, onnxruntime", "gpt2, autocast to bfloat16, aten"]


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_tokens_are_eagers_and_the_training_goes_on(name: str) -> None:
    architecture, chosen, engine = name.split(", ")
    case, precision = MODELS[architecture], PRECISIONS[chosen]
    plain: Any = precision.of(case.build(dropout=0.1))
    options: Any = Options(engine=engine, fallback="raise", precision=precision.option)  # type: ignore[arg-type]
    graph = ORTModule(copy.deepcopy(plain), options=options)
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.5)
    prompt = {k: v for k, v in case.batch(2, 5).items() if k != "labels"}
    for number in range(3):
        with precision.around(eager=False):
            loss = loss_of(graph(**precision.of(case.batch(3, 7, number))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(graph.state_dict())
        graph.eval()
        plain.eval()
        for search in SEARCHES:
            found = []
            for model in (plain, graph):
                torch.manual_seed(number)
                with precision.around(eager=precision.place != "options"), torch.no_grad():
                    tokens = model.generate(
                        **prompt, **search, use_cache=True, max_new_tokens=6, min_new_tokens=6
                    )
                found.append(tokens)
            assert torch.equal(*found), search
        graph.train()
    assert (graph.report.mode, graph.report.captures, graph.report.graph_calls) == ("graph", 1, 3)


@pytest.mark.parametrize("name", sampled(("gpt2", "bloom", "llama", "bart", "t5"), ["gpt2"]))
def test_a_generator_follows_the_training(name: str) -> None:
    """Its graphs read the weights where they are; nothing is captured again."""
    case = MODELS[name]
    plain: Any = case.build(dropout=0.1)
    graph = ORTModule(copy.deepcopy(plain), options=Options(engine="aten", fallback="raise"))
    generator = ORTGenerator(graph, options=Options(fallback="raise"))
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.5)
    prompt = {k: v for k, v in case.batch(2, 5).items() if k != "labels"}
    captures = []
    for number in range(3):
        loss_of(graph(**case.batch(3, 7, number))).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(graph.state_dict())
        graph.eval()
        plain.eval()
        for search in SEARCHES:
            found = []
            for model in (plain, generator):
                torch.manual_seed(number)
                found.append(
                    model.generate(
                        **prompt, **search, use_cache=True, max_new_tokens=6, min_new_tokens=6
                    )
                )
            assert torch.equal(*found), search
        graph.train()
        captures.append(generator.report.captures)
    assert len(set(captures)) == 1
    assert generator.report.fallback_calls == 0
    assert graph.report.captures == 1
