"""What scripts do with a module besides calling it, done with an ORTModule around it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import DebugOptions, LogLevel, Options, ORTModule
from ortrain.errors import OrtrainWarning
from tests.module.agreement import GRAPH


class Own(nn.Module):
    """Has methods of nn.Module with signatures and results of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.asked: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def train(self, mode: bool = True, extra: Any = None) -> Own:
        self.asked = [*self.asked, ("train", mode, extra)]
        return super().train(mode)

    def eval(self, quietly: bool = False) -> Own:
        self.asked = [*self.asked, ("eval", quietly)]
        return super().eval()

    def zero_grad(self, set_to_none: bool = True, only: str = "") -> None:
        self.asked = [*self.asked, ("zero_grad", only)]
        super().zero_grad(set_to_none)

    def requires_grad_(self, requires_grad: bool = True, part: str = "") -> Own:
        self.asked = [*self.asked, ("requires_grad_", part)]
        return super().requires_grad_(requires_grad)

    def named_parameters(self, *args: Any, sort: bool = False, **kwargs: Any) -> Iterator[Any]:
        found = list(super().named_parameters(*args, **kwargs))
        yield from sorted(found, key=lambda item: item[0]) if sort else found


def x() -> Tensor:
    return torch.randn(3, 4)


# --- methods with signatures of their own -------------------------------------------------------


def test_methods_that_the_class_has_made_its_own_take_its_arguments() -> None:
    model: Any = ORTModule(Own(), options=GRAPH)
    assert model.train(True, extra=3) is model
    assert model.train(mode=False) is model
    assert model.eval(quietly=True) is model
    assert model.requires_grad_(True, part="layer") is model
    assert model.zero_grad(only="layer") is None
    asked = [each for each in model.asked if each[:2] != ("train", False) or each[2]]
    assert asked[0] == ("train", True, 3)
    assert ("eval", True) in asked
    assert ("requires_grad_", "layer") in asked
    assert ("zero_grad", "layer") in asked
    named = [name for name, _ in model.named_parameters(sort=True)]
    assert named == ["layer.bias", "layer.weight"]


def test_a_module_with_a_train_of_its_own_trains_as_a_graph() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Own())
    model = ORTModule(module[1], options=GRAPH)
    for mode in (True, False, True):
        model.train(mode)
        value = x()
        torch.testing.assert_close(model(value), module[1](value))
    assert model.report.mode == "graph"


def test_a_method_of_a_subclass_of_ours_stays_its_own() -> None:
    class Wrapper(ORTModule):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls = "ours"

    model: Any = Wrapper(Own(), options=GRAPH)
    model.zero_grad()
    assert model.calls == "ours"


def test_a_property_of_a_subclass_is_set_on_the_subclass() -> None:
    class Wrapper(ORTModule):
        @property
        def temperature(self) -> float:
            return float(self.__dict__.get("degrees", 1.0))

        @temperature.setter
        def temperature(self, degrees: float) -> None:
            self.__dict__["degrees"] = degrees

        @property
        def fixed(self) -> int:
            return 3

    module = nn.Linear(4, 4)
    model: Any = Wrapper(module, options=GRAPH)
    model.temperature = 2.0
    assert model.temperature == 2.0
    assert not hasattr(module, "temperature")
    # What cannot be set is the module's, as any other attribute.
    model.fixed = 4
    assert vars(module)["fixed"] == 4


# --- files --------------------------------------------------------------------------------------


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_weights_only_loads_a_wrapped_model_where_it_loads_the_model(tmp_path: Path) -> None:
    options = Options(engine="onnxruntime", fallback="raise", cache_dir=tmp_path)
    debug = DebugOptions(log_level=LogLevel.ERROR)
    model = ORTModule(nn.Linear(4, 2), debug, options=options)
    value = x()
    before = model(value)
    with torch.serialization.safe_globals([nn.Linear, set]):
        copied = torch.load(saved(model), weights_only=True)
    assert isinstance(copied, ORTModule)
    assert copied.options == options
    assert copied._debug_options == debug
    torch.testing.assert_close(copied(value), before)
    assert copied.report.mode == "graph"


def test_weights_only_still_asks_for_the_classes_of_the_model() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"Own"):
        torch.load(saved(ORTModule(Own())), weights_only=True)


def test_a_subclass_comes_back_as_itself() -> None:
    assert type(pickle.loads(pickle.dumps(Wrapped(nn.Linear(2, 2))))) is Wrapped


class Wrapped(ORTModule):
    pass


def test_a_shallow_copy_shares_parameters_and_no_attributes() -> None:
    module = Own()
    model: Any = ORTModule(module, options=GRAPH)
    copied: Any = copy.copy(model)
    plain = copy.copy(module)
    copied.asked = plain.asked = ["only here"]
    assert isinstance(copied, ORTModule)
    assert model.asked == module.asked == []
    assert copied.layer is plain.layer is model.layer
    value = x()
    torch.testing.assert_close(copied(value), model(value))
    assert copied.report.mode == "graph"
    assert model.report.graph_calls == 1


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"log_level": "INFO"}, TypeError, "log_level='INFO': expected a LogLevel"),
        ({"log_level": True}, TypeError, "log_level=True: expected a LogLevel"),
        ({"log_level": 9}, ValueError, r"log_level=9: expected one of VERBOSE \(0\)"),
        ({"save_onnx": "yes"}, TypeError, "save_onnx='yes': expected True or False"),
        ({"onnx_prefix": 3}, TypeError, "onnx_prefix=3: expected a string"),
        ({"save_path": 3}, TypeError, "save_path=3: expected the path of a folder"),
        ({"save_onnx": True}, ValueError, "needs an onnx_prefix"),
        ({"onnx_prefix": "../m"}, ValueError, "leads out of the folder"),
        ({"onnx_prefix": "/tmp/m"}, ValueError, "leads out of the folder"),
        ({"onnx_prefix": "a/../../m"}, ValueError, "leads out of the folder"),
        ({"onnx_prefix": "m\0"}, ValueError, "leads out of the folder"),
    ],
)
def test_wrong_debug_options_are_refused_when_they_are_made(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DebugOptions(**wrong)


def test_a_level_may_be_its_number() -> None:
    assert DebugOptions(log_level=2).log_level is LogLevel.INFO  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_refused_when_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "graphs"
    with pytest.raises(ValueError, match=r"cannot write into '.*graphs': '.*file' is no folder"):
        DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(inside))
    DebugOptions(save_onnx=True, onnx_prefix="m", save_path=tmp_path / "made" / "later")


# --- what falls back ----------------------------------------------------------------------------


class Returns(Own):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.__dict__["make"] = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


@pytest.mark.parametrize(
    "make",
    [lambda y: {y}, lambda y: (y, y.device), lambda y: (y, y.shape[0]), lambda y: iter((y,))],
)
def test_outputs_of_other_kinds_come_as_they_are(make: Any) -> None:
    model = ORTModule(Returns(make), options=Options(engine="onnxruntime"))
    value = x()
    found, expected = model(value), model.module(value)
    assert type(found) is type(expected)
    assert model.report.mode == "graph"
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


def test_an_array_is_read_between_two_graphs() -> None:
    class Takes(Own):
        def forward(self, x: Tensor, scale: Any = None) -> Tensor:
            return super().forward(x) * float(scale.sum())

    model = ORTModule(Takes(), options=Options(engine="onnxruntime"))
    for number in (1, 2, 3):
        value, scale = x(), np.full(2, number)
        torch.testing.assert_close(model(value, scale=scale), model.module(value, scale=scale))


# --- never called -------------------------------------------------------------------------------


def dropped(model: list[ORTModule]) -> list[str]:
    """The warnings as the last reference goes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.clear()
        gc.collect()
    return [str(each.message) for each in caught if each.category is OrtrainWarning]


def test_a_module_that_is_trained_around_its_wrapper_says_so_in_the_end() -> None:
    module = nn.Linear(4, 2)
    model = [ORTModule(module)]
    module(x()).sum().backward()
    (told,) = dropped(model)
    assert "ORTModule around Linear was never called" in told


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(x()).sum().backward(),
        lambda model: None,
        lambda model: model.module(x()),
    ],
)
def test_a_wrapper_that_is_called_or_whose_module_is_not_trained_says_nothing(use: Any) -> None:
    model = [ORTModule(nn.Linear(4, 2), options=GRAPH)]
    use(model[0])
    assert dropped(model) == []


def test_a_wrapped_part_of_a_wrapped_model_counts_as_called() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), ORTModule(nn.Linear(4, 2)))
    model = [ORTModule(inner, options=GRAPH)]
    model[0](x()).sum().backward()
    del inner
    assert dropped(model) == []


def test_gradients_from_before_are_no_sign() -> None:
    module = nn.Linear(4, 2)
    module(x()).sum().backward()
    assert dropped([ORTModule(module)]) == []


def test_a_level_above_silences_it() -> None:
    module = nn.Linear(4, 2)
    model = [ORTModule(module, DebugOptions(log_level=LogLevel.ERROR))]
    module(x()).sum().backward()
    assert dropped(model) == []
