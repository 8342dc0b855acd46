"""Modules that are given what a tokenizer or a feature extractor returns, as it is."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BatchFeature

from ortrain import Options, ORTModule


class Reading(nn.Module):
    """Reads what it is given in one way or another."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 3), read

    def forward(self, batch: Any) -> Tensor:
        result: Tensor = self.layer(self.read(batch))
        return result


class Encodings:
    """Stands for what the tokenizers library returns: no tensor, no constant."""

    n_sequences = 1

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Own(UserDict[str, Any]):
    """A dictionary of a script's own."""

    factor = 2.0


def _encoding(**more: Any) -> BatchEncoding:
    data = {"x": torch.randn(2, 4), "mask": torch.ones(2, 4)}
    return BatchEncoding(data, **{"encoding": [Encodings(2.0)], **more})


def _feature() -> BatchFeature:
    return BatchFeature({"x": torch.randn(2, 4), "mask": torch.ones(2, 4)})


def _own() -> Own:
    return Own(x=torch.randn(2, 4), mask=torch.ones(2, 4))


READS: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda b: b["x"] * b["mask"],
    "get": lambda b: b.get("x") * (1 if "labels" in b else b.get("mask")),
    "every entry": lambda b: sum(b.values()),
    "as keywords": lambda b: torch.add(*dict(**b).values()),
    "a length": lambda b: b["x"] * len(b),
    "a copy": lambda b: dict(b)["x"],
}


@pytest.mark.parametrize("make", [_encoding, _feature, _own], ids=lambda make: make.__name__[1:])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_its_entries_are_inputs(read: str, make: Callable[[], Any], engine: Any) -> None:
    torch.manual_seed(0)
    module = Reading(READS[read])
    eager = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    for _ in range(2):
        batch = make()
        output = model(batch)
        torch.testing.assert_close(output, eager(batch))
        output.sum().backward()
    assert (model.report.captures, model.report.graph_calls) == (1, 2)


def test_attributes_and_moves_as_transformers_has_them() -> None:
    module = Reading(lambda b: b.to("cpu").x * b.mask * (2 if b.is_fast else 3))
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    batch = _encoding()
    torch.testing.assert_close(model(batch), module.layer(batch.x * 2))


def test_a_constant_among_its_attributes_is_watched() -> None:
    module = Reading(lambda b: b["x"] * (b.n_sequences or 7))
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    for count in (1, 1, 2, 2, None):
        batch = _encoding(encoding=None, n_sequences=count)
        torch.testing.assert_close(model(batch), module.layer(batch["x"] * (count or 7)))


def test_what_its_attributes_hold_is_that_of_each_call() -> None:
    module = Reading(lambda b: b["x"] * b.encodings[0].factor)
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    for factor in (2.0, 3.0, 4.0):
        batch = _encoding(encoding=[Encodings(factor)])
        torch.testing.assert_close(model(batch), module.layer(batch["x"] * factor))


@pytest.mark.parametrize("make", [_encoding, _feature, _own], ids=lambda make: make.__name__[1:])
def test_what_the_forward_puts_in_is_there(make: Callable[[], Any]) -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, features: Any) -> Any:
            features.update(embedding=self.layer(features["x"]))
            features.pop("mask")
            return features

    model = ORTModule(Embedding(), options=Options(engine="aten", fallback="raise"))
    for _ in range(2):
        batch = make()
        assert model(batch) is batch
        assert [*batch] == ["x", "embedding"]
        torch.testing.assert_close(batch["embedding"], model.module.layer(batch["x"]))
        batch["embedding"].sum().backward()
    assert model.report.graph_calls == 2
