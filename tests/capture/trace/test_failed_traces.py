"""A trace that fails leaves a module to the next one as it was."""

from __future__ import annotations

import builtins
import functools
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.capture.export import capture
from ortrain.capture.trace import exporter
from ortrain.module_state import untouched

X = torch.arange(12.0).reshape(3, 4)
NOTES = SimpleNamespace(count=0)


class Noting(nn.Module):
    """Notes something at each call, or at its first, and may compute by it."""

    def __init__(self, note: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = SimpleNamespace(kind=None)
        self.kind: str | None = None
        self.count = 0
        self.seen: list[int] = []
        self.found: dict[str, int] = {}
        self.ordered: OrderedDict[int, int] = OrderedDict()
        self.known: set[int] = set()
        self.register_buffer("calls", torch.zeros(()))
        self.note = note
        self.memo = functools.cache(lambda kind: f"{kind}!")

    def forward(self, value: Tensor) -> Tensor:
        self.note(self)
        result: Tensor = self.layer(value)
        return result * 2 if self.kind or self.config.kind or self.count or self.seen else result


def filled(holder: Any) -> None:
    if holder.kind is None:
        holder.kind = "doubled"


def drawn(module: Any) -> None:
    module.found["drawn"] = random.randrange(9)


NOTED: dict[str, Callable[[Any], Any]] = {
    "a setting that is missing": lambda module: filled(module.config),
    "an attribute that is None": lambda module: filled(module),
    "a counter": lambda module: setattr(module, "count", module.count + 1),
    "a list": lambda module: module.seen.append(len(module.seen)),
    "a list once": lambda module: module.seen or module.seen.append(1),
    "a dict": lambda module: module.found.update(calls=len(module.found)),
    "an ordered dict": lambda module: module.ordered.setdefault(len(module.ordered), 1),
    "a set": lambda module: module.known.add(len(module.known)),
    "a memo": lambda module: module.memo(module.kind),
    "a global": lambda module: setattr(NOTES, "count", NOTES.count + 1),
    "a buffer": lambda module: module.calls.add_(1),
    "a random number": lambda module: drawn(module),
    "a hook": lambda module: module.layer.register_forward_hook(lambda *_: None),
    "nothing": lambda module: None,
}


def let_the_first_trace_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the forward has run."""
    export, traces = exporter.export, itertools.count()

    def export_or_fail(*args: Any, **kwargs: Any) -> Any:
        found = export(*args, **kwargs)
        if next(traces) == 0:
            raise AssertionError("injected")
        return found

    monkeypatch.setattr(exporter, "export", export_or_fail)


def state(module: Noting) -> tuple[Any, ...]:
    held = (module.config.kind, module.kind, module.count, module.seen, module.found)
    others = (module.ordered, module.known, len(module.layer._forward_hooks))
    return (*held, *others, float(module.calls))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("noted", NOTED)
def test_a_model_does_what_pytorch_does_where_a_trace_has_failed(
    noted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    eager, served = Noting(NOTED[noted]), Noting(NOTED[noted])
    served.load_state_dict(eager.state_dict())
    let_the_first_trace_fail(monkeypatch)
    model: Any = ORTModule(served, options=Options(engine="aten"))
    counts = []
    for each in (eager, model):
        random.seed(0)
        NOTES.count = 0
        outputs = [each(X) for _ in range(3)]
        counts.append((NOTES.count, random.random(), *outputs))
    for mine, its in zip(counts[1], counts[0], strict=True):
        torch.testing.assert_close(mine, its)
    assert state(served) == state(eager)


def test_what_it_fills_in_is_filled_in_after_a_trace_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ortrain.capture.trace.ladder.rehearsed", lambda *_: [])
    let_the_first_trace_fail(monkeypatch)
    module = Noting(NOTED["a setting that is missing"])
    assert capture(module, (X,)).rung == "strict"
    assert module.config.kind == "doubled"


class FillingIn(nn.Module):
    """Fills in a setting, and computes by a rule.

    Args:
        rule: of what a layer makes of a value, the value and the setting.
    """

    def __init__(self, rule: Callable[[Tensor, Tensor, str], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = SimpleNamespace(kind=None)
        self.rule = rule

    def forward(self, value: Tensor) -> Tensor:
        filled(self.config)
        return self.rule(self.layer(value), value, self.config.kind)


def test_what_it_fills_in_is_filled_in_where_another_trace_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ortrain.capture.trace.ladder.rehearsed", lambda *_: [])

    def fixing_the_batch(result: Tensor, value: Tensor, kind: str) -> Tensor:
        result = result.reshape(builtins.len(value), -1)  # Dynamo sees through it
        return result * 2 if kind else result

    module = FillingIn(fixing_the_batch)
    assert capture(module, (X,)).rung == "strict"
    assert module.config.kind == "doubled"


def test_the_first_question_for_a_tensors_attributes_disturbs_no_trace() -> None:
    def asking(result: Tensor, value: Tensor, kind: str) -> Tensor:
        return result * 2 if getattr(value, "constant", None) else result

    untouched._of_every_stand_in.cache_clear()
    captured = capture(FillingIn(asking), (X,))
    assert captured.rung == "non-strict"
