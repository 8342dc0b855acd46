"""Calls of ``torch.onnx.export`` with old arguments go to the exporter that they were made for."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.onnx import TrainingMode

from ortrain.compat.exporting import extend
from ortrain.errors import OrtrainWarning

AXES = {"x": {0: "rows"}}


def extended(own: Callable[..., Any]) -> Callable[..., Any]:
    """An export, as scripts find it."""
    module = ModuleType("torch.onnx")
    module.__dict__["export"] = own
    extend(module)
    once = module.__dict__["export"]
    extend(module)
    assert module.__dict__["export"] is once
    return once  # type: ignore[no-any-return]


class Recorded:
    """An export that only notes how it is called, and in which mode the model is then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.modes: list[bool] = []
        self.error = error

    def __call__(self, model: Any, args: Any = (), f: Any = None, **kwargs: Any) -> str:
        self.calls.append(kwargs)
        self.modes.append(model.training)
        if self.error is not None and kwargs.get("dynamo") is False:
            raise self.error
        return "exported"


@pytest.mark.parametrize(
    "given",
    [
        {"training": TrainingMode.TRAINING},
        {"do_constant_folding": False},
        {"dynamic_axes": AXES, "opset_version": 14},
    ],
)
def test_an_old_argument_asks_for_the_exporter_of_then(given: dict[str, Any]) -> None:
    own = Recorded()
    with pytest.warns(OrtrainWarning, match=r"dynamo=False; say dynamo= to choose") as told:
        assert extended(own)(nn.ReLU(), (), "f", **given) == "exported"
    assert own.calls == [{**given, "dynamo": False}]
    assert next(iter(given)) in str(told[0].message)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"input_names": ["x"], "opset_version": 18},
        {"dynamic_axes": AXES, "dynamo": True},
        {"dynamic_axes": AXES, "dynamo": False},
        {"do_constant_folding": True, "dynamic_shapes": {}},
        {"dynamic_axes": AXES, "external_data": False},
    ],
)
def test_other_calls_stay_as_they_are(given: dict[str, Any]) -> None:
    own = Recorded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extended(own)(nn.ReLU(), (), "f", **given)
    assert own.calls == [given]


def test_positions_are_those_of_then_and_what_did_nothing_is_left_out() -> None:
    own = Recorded()
    with pytest.warns(OrtrainWarning, match="example_outputs, training are of"):
        extended(own)(
            nn.ReLU(), (), "f", True, False, TrainingMode.PRESERVE, ["x"], example_outputs=None
        )
    assert own.calls == [
        {
            "export_params": True,
            "verbose": False,
            "training": TrainingMode.PRESERVE,
            "input_names": ["x"],
            "dynamo": False,
        }
    ]


@pytest.mark.parametrize(
    ("given", "training"),
    [({}, False), ({"training": TrainingMode.TRAINING}, True)],
)
def test_where_it_fails_todays_takes_its_place_in_the_mode_that_was_meant(
    given: dict[str, Any], training: bool
) -> None:
    own = Recorded(RuntimeError("no such operator\nand more"))
    model = nn.Sequential(nn.ReLU(), nn.Dropout())
    model.train(not training)
    model[1].train(training)
    with pytest.warns(OrtrainWarning) as told:
        assert extended(own)(model, (), "f", dynamic_axes=AXES, **given) == "exported"
    assert "fails (RuntimeError: no such operator), and that of today" in str(told[1].message)
    assert own.calls == [
        {"dynamic_axes": AXES, **given, "dynamo": False},
        {"dynamic_axes": AXES, **given},
    ]
    assert own.modes == [not training, training]
    assert (model.training, model[1].training) == (not training, training)


@pytest.mark.filterwarnings("ignore:torch.onnx.export:ortrain.errors.OrtrainWarning")
def test_a_model_in_training_mode_goes_to_its_file_as_one_that_evaluates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    x, file = torch.randn(5, 4), io.BytesIO()
    model(x)  # moves the running statistics
    extended(torch.onnx.export)(
        model,
        torch.randn(3, 4),
        file,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "rows"}, "y": {0: "rows"}},
        do_constant_folding=False,
    )
    assert model.training
    proto = onnx.load_model_from_string(file.getvalue())
    assert {name for name, _ in model.named_parameters()} <= {
        tensor.name for tensor in proto.graph.initializer
    }
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (result,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), model.eval()(x), rtol=1e-5, atol=1e-6)
