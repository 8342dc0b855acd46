"""What a forward changes in lists, dicts and dataclasses that it is given, its caller finds."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.module.agreement import GRAPH

Change = Callable[[Any, Tensor], Any]


@dataclass
class Batch:
    """What some scripts hand to their models."""

    x: Any
    more: Any = None
    name: str = "batch"


class Changing(nn.Module):
    """Computes, and changes what it is given."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change

    def forward(self, batch: Any) -> Any:
        x = batch["x"] if isinstance(batch, dict) else getattr(batch, "x", None)
        x = batch[0] if x is None else x
        return self.change(batch, self.layer(x))


def _whole(batch: dict[str, Any], y: Tensor) -> Any:
    batch["y"] = y
    return batch


def _updated(batch: dict[str, Any], y: Tensor) -> Any:
    batch.update(y=y, mean=y.mean(), name="updated")
    return y


def _popped(batch: dict[str, Any], y: Tensor) -> Any:
    return (y - batch.pop("labels")).square().mean()


def _replaced(batch: dict[str, Any], y: Tensor) -> Any:
    batch["x"], batch["labels"] = batch["labels"], y
    return y.sum()


def _renamed(batch: dict[str, Any], y: Tensor) -> Any:
    batch["first"] = batch.pop("x")
    batch["x"] = y
    return y.sum()


def _nested(batch: dict[str, Any], y: Tensor) -> Any:
    batch["notes"]["y"] = y
    batch["notes"]["list"].append(y * 2)
    return {"loss": y.sum()}


def _emptied(batch: dict[str, Any], y: Tensor) -> Any:
    batch.clear()
    return y


def _made(batch: dict[str, Any], y: Tensor) -> Any:
    batch["outputs"] = [y, {"twice": (2 * y, "text")}, None]
    return y.sum()


def _untouched(batch: dict[str, Any], y: Tensor) -> Any:
    batch["x"] = batch["x"]
    return y


DICTS: dict[str, Change] = {
    each.__name__[1:]: each
    for each in (
        _whole, _updated, _popped, _replaced, _renamed, _nested, _emptied, _made, _untouched,
    )
}  # fmt: skip


def _appended(batch: list[Any], y: Tensor) -> Any:
    batch.append(y)
    return y.sum()


def _inserted(batch: list[Any], y: Tensor) -> Any:
    batch.insert(0, y)
    batch.append("text")
    return batch


def _swapped(batch: list[Any], y: Tensor) -> Any:
    batch[0], batch[1] = batch[1], y
    return y


def _shortened(batch: list[Any], y: Tensor) -> Any:
    return y - batch.pop()


def _reversed(batch: list[Any], y: Tensor) -> Any:
    batch.reverse()
    return y


LISTS: dict[str, Change] = {
    each.__name__[1:]: each for each in (_appended, _inserted, _swapped, _shortened, _reversed)
}


def _set(batch: Batch, y: Tensor) -> Any:
    batch.more = y
    return y.sum()


def _added(batch: Batch, y: Tensor) -> Any:
    batch.loss, batch.name = y.sum(), "added"  # type: ignore[attr-defined]
    return batch


def _deleted(batch: Batch, y: Tensor) -> Any:
    del batch.more
    return y.sum()


RECORDS: dict[str, Change] = {each.__name__[1:]: each for each in (_set, _added, _deleted)}


def _dict() -> dict[str, Any]:
    return {
        "x": torch.randn(2, 4),
        "labels": torch.randn(2, 3),
        "name": "batch",
        "notes": {"list": [torch.ones(1)]},
    }


def _defaults() -> Any:
    return defaultdict(list, _dict())


CASES = [
    *((change, make) for change in DICTS for make in (_dict, lambda: OrderedDict(_dict()))),
    *((change, _defaults) for change in ("whole", "popped")),
    *((change, lambda: [torch.randn(2, 4), torch.randn(2, 3)]) for change in LISTS),
    *((change, lambda: Batch(torch.randn(2, 4), torch.randn(3))) for change in RECORDS),
]
EVERY = DICTS | LISTS | RECORDS


def _same(one: Any, other: Any) -> bool:
    """Whether two values are of the same types and tensors."""
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other)
        return one.requires_grad == other.requires_grad
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Batch):
        return _same(vars(one), vars(other))
    return bool(one == other)


def _total(value: Any) -> Tensor:
    """A loss of everything in a value that can have a gradient."""
    if isinstance(value, Tensor):
        return value.square().sum() if value.requires_grad else torch.zeros(())
    if isinstance(value, Batch):
        value = vars(value)
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return torch.zeros(())
    return sum(map(_total, children), torch.zeros(()))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize(
    ("change", "make"), CASES, ids=[f"{c}-{type(m()).__name__}" for c, m in CASES]
)
def test_the_callers_containers_are_as_eager_leaves_them(
    change: str, make: Callable[[], Any], engine: Any
) -> None:
    torch.manual_seed(0)
    module = Changing(EVERY[change])
    eager = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    for _ in range(3):
        batch = make()
        twin = copy.deepcopy(batch)
        kept = [*batch.values()] if isinstance(batch, dict) else []
        output, expected = model(batch), eager(twin)
        assert (output is batch) == (expected is twin)
        assert _same(output, expected)
        assert _same(batch, twin)
        if isinstance(batch, dict):  # what stays is the very same object
            same = {id(value) for value in kept}
            assert all(id(batch[k]) in same for k in ("x", "notes") if k in batch) or change in (
                "replaced", "renamed",
            )  # fmt: skip
        (_total(output) + _total(batch)).backward()
        (_total(expected) + _total(twin)).backward()
        for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert model.report.graph_calls == 3


def test_a_container_that_stands_twice_in_a_call_is_changed_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, one: list[Tensor], other: list[Tensor]) -> Tensor:
            one.append(self.layer(one[0]))
            return other[-1].sum()

    model = ORTModule(Two(), options=Options(engine="aten"))
    twin = copy.deepcopy(model.module)
    x, z = torch.randn(2, 4), torch.randn(2, 4)
    apart: Any = [x], [z]
    torch.testing.assert_close(model(*apart), z.sum())
    assert (len(apart[0]), len(apart[1])) == (2, 1)
    both: Any = [x]
    output = model(both, both)
    assert len(both) == 2
    torch.testing.assert_close(output, twin([x], [x, twin.layer(x)]))
    assert model.report.graph_calls == 2


def test_a_container_of_another_kind_is_as_eager_leaves_it() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, batch: Any) -> Tensor:
            batch["attentions"] = self.layer(batch.last_hidden_state)
            result: Tensor = batch.attentions.sum()
            return result

    model: Any = ORTModule(Encoded(), options=Options(engine="aten"))
    batch = BaseModelOutput(last_hidden_state=torch.randn(2, 4))  # type: ignore[arg-type]
    output = model(batch)
    expected = model.module.layer(batch.last_hidden_state)
    torch.testing.assert_close(batch["attentions"], expected)
    assert batch.attentions is batch["attentions"]
    torch.testing.assert_close(output, expected.sum())
    assert model.report.mode == "graph"


def test_a_backward_that_runs_again_in_pytorch_sees_the_call_as_it_was() -> None:
    """The forward has taken the labels out of the caller's dict."""
    torch.manual_seed(0)
    module = Changing(_popped)
    eager, model = copy.deepcopy(module), ORTModule(module, options=GRAPH)
    batch = {"x": torch.randn(2, 4), "labels": torch.randn(2, 3)}
    grads = []
    for each in (model, eager):
        loss = each(dict(batch))
        (first,) = torch.autograd.grad(loss, [next(each.parameters())], create_graph=True)
        grads.append(torch.autograd.grad(first.sum(), [next(each.parameters())])[0])
    torch.testing.assert_close(*grads)
