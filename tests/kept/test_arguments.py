"""The arguments of a kept call: lists, of one thing too, stay lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.kept.arguments import Arguments

x, y = torch.ones(2), torch.zeros(3)
GIVEN: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((x,), {}),
    ((x, 1, None), {}),
    (([x],), {}),
    (((x,),), {}),
    ((x, [1], [2]), {}),
    (([], x, [y, 2]), {}),
    (([x, y], []), {}),
    ((x, {"a": y}), {}),
    ((), {"a": [x]}),
    ((x,), {"b": y}),
    (([None],), {}),
]


@pytest.mark.parametrize("given", GIVEN)
def test_arguments_are_put_together_as_they_were(
    given: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:
    args, kwargs = given
    arguments = Arguments(args, kwargs)
    made, named = arguments.filled([*arguments.tensors, *arguments.sizes])
    assert len(made) == len(args)
    for mine, theirs in zip((*made, *named.values()), (*args, *kwargs.values()), strict=True):
        assert type(mine) is type(theirs)
        assert mine is theirs or mine == theirs


class Rows(nn.Module):
    """Counts what it is given, in PyTorch: a list of one tensor has one, the tensor its rows."""

    def forward(self, tensors: list[Tensor]) -> Tensor:
        float(tensors[0].detach().numpy().sum())
        return sum(tensors) * len(tensors)  # type: ignore[return-value]


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.last = nn.Linear(3, 3), Rows(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.rows([self.first(x)]))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_a_sub_module_that_is_given_a_list_of_one_tensor_gets_that_list(engine: Any) -> None:
    module = Listing()
    model = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    for rows in (4, 2):
        batch = torch.randn(rows, 3)
        torch.testing.assert_close(model(batch), module(batch), rtol=1e-5, atol=1e-6)
    assert [call.site.name for call in model.report.kept] == ["rows"]


def test_an_operator_that_is_given_sizes_of_one_axis_gets_them() -> None:
    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_strided_scatter(self.layer(x), x[0, :1], (1,), (1,))

    module = Scattered()
    model = ORTModule(module, options=Options(engine="aten"))
    for rows in (3, 2):
        batch = torch.randn(rows, 4)
        torch.testing.assert_close(model(batch), module(batch), rtol=1e-5, atol=1e-6)
    assert "of ortrain's own" not in model.report.reason
