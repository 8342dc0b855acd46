"""Models of one file answer as PyTorch's do, in every size, for both kinds of arrays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertForSequenceClassification

from ortrain.deploy import (
    AutoOptimizationConfig,
    AutoQuantizationConfig,
    ORTOptimizer,
    ORTQuantizer,
)
from ortrain.deploy.models import ORTModelForSequenceClassification
from ortrain.errors import ExecutionError, InputError, NotServed, UnsupportedInput
from tests.deploy.exported import ONE_FILE, call, folder, ort_model, torch_model

SIZES = ((2, 6), (1, 9), (5, 3), (1, 1), (3, 17))


def assert_alike(found: Any, expected: Any, atol: float = 1e-4) -> None:
    assert list(found) == [name for name in expected if name in found]
    assert {"logits", "start_logits", "last_hidden_state"} & {*found}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize("name", ONE_FILE)
def test_a_file_answers_as_pytorch_does_at_every_size(name: str) -> None:
    model, ours = torch_model(name), ort_model(name)
    with torch.no_grad():
        for rows, length in SIZES:
            given = call(name, rows, length)
            expected, found = model(**given), ours(**given)
            assert type(found).__name__ == type(expected).__name__ or name == "features"
            assert_alike(found, expected)


@pytest.mark.parametrize("name", ONE_FILE)
def test_numpy_arrays_come_back_for_numpy_arrays(name: str) -> None:
    given = call(name, 2, 6)
    expected = ort_model(name)(**given)
    found = ort_model(name)(**{key: value.numpy() for key, value in given.items()})
    assert list(found) == list(expected)
    for key, value in found.items():
        assert isinstance(value, np.ndarray)
        np.testing.assert_array_equal(value, expected[key].numpy())


def test_arrays_that_cannot_be_written_or_lie_apart_are_read_as_they_are() -> None:
    given = {key: value.numpy() for key, value in call("classes", 3, 8).items()}
    expected = ort_model("classes")(**given).logits
    frozen = {key: value.copy() for key, value in given.items()}
    for value in frozen.values():
        value.flags.writeable = False
    apart = {key: np.asfortranarray(value) for key, value in given.items()}
    backwards = {key: value[:, ::-1].copy()[:, ::-1] for key, value in given.items()}
    for other in (frozen, apart, backwards):
        np.testing.assert_array_equal(ort_model("classes")(**other).logits, expected)


def test_tensors_that_lie_apart_are_read_as_they_are() -> None:
    given = call("classes", 3, 8)
    expected = ort_model("classes")(**given).logits
    apart = {key: value.t().contiguous().t() for key, value in given.items()}
    assert torch.equal(ort_model("classes")(**apart).logits, expected)


def test_a_result_is_new_memory_that_outlives_further_calls() -> None:
    ours = ort_model("classes")
    first = ours(**call("classes", 2, 6)).logits
    kept = first.clone()
    for _ in range(3):
        ours(**call("classes", 2, 7))
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(ours(**call("classes", 2, 6)).logits, kept)


def test_the_first_arguments_may_be_positional_and_a_result_a_tuple() -> None:
    ours, given = ort_model("classes"), call("classes", 2, 6)
    expected = ours(**given)
    found = ours(given["input_ids"], given["attention_mask"], given["token_type_ids"])
    assert torch.equal(found.logits, expected.logits)
    as_tuple = ours(**given, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], expected.logits)


def test_masks_and_types_are_made_as_transformers_makes_them() -> None:
    for name in ("classes", "tokens", "masked", "choices", "letters"):
        model, ours = torch_model(name), ort_model(name)
        given = call(name, 1, 7)
        main = next(iter(given))
        with torch.no_grad():
            assert_alike(ours(**{main: given[main]}), model(**{main: given[main]}))


def test_smaller_integers_booleans_and_other_floats_are_taken_as_the_file_takes_them() -> None:
    given, ours = call("classes", 2, 6), ort_model("classes")
    expected = ours(**given).logits
    small = {key: value.to(torch.int32) for key, value in given.items()}
    assert torch.equal(ours(**small).logits, expected)
    masked = {**given, "attention_mask": given["attention_mask"].bool()}
    assert torch.equal(ours(**masked).logits, expected)
    image = call("images", 2, 0)["pixel_values"]
    assert torch.equal(
        ort_model("images")(image.double()).logits, ort_model("images")(image).logits
    )


# --- what a file does not take ------------------------------------------------------------------


def test_an_argument_that_changes_nothing_may_be_given() -> None:
    given, ours = call("tokens", 2, 6), ort_model("tokens")
    expected = ours(**given).logits
    extra = {
        "token_type_ids": torch.zeros_like(given["input_ids"]),
        "position_ids": torch.arange(6)[None],
        "labels": None,
        "output_attentions": False,
        "output_hidden_states": None,
        "use_cache": False,
    }
    assert torch.equal(ours(**given, **extra).logits, expected)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"token_type_ids": torch.ones(2, 6, dtype=torch.int64)}, "some of them are not 0"),
        ({"position_ids": torch.arange(5, -1, -1)[None]}, "do not count the tokens"),
        ({"labels": torch.zeros(2, 6, dtype=torch.int64)}, r"ortrain\.ORTModule"),
        ({"colours": torch.zeros(2)}, r"takes no colours.*\n.*input_ids, attention_mask"),
        ({"output_attentions": True}, "output_attentions=True, which the file"),
        ({"use_cache": True}, "use_cache=True, which the file does not have"),
        ({"output_hidden_states": True}, "output_hidden_states=True, which"),
    ],
)
def test_an_argument_that_would_change_the_answer_is_refused(
    extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        ort_model("tokens")(**call("tokens", 2, 6), **extra)


class Deaf(BertForSequenceClassification):
    """Reads no mask, as MRA does in some of its layers' settings."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_mask_that_the_model_does_not_read_may_be_given(tmp_path: Path) -> None:
    model = Deaf(torch_model("classes").config).eval()
    kind = ORTModelForSequenceClassification
    exported = kind.from_pretrained(model, export=True)
    assert "attention_mask" not in exported.session.inputs
    given = call("classes", 2, 6)
    given.pop("token_type_ids")
    with torch.no_grad():
        expected = model(**given).logits
    ORTOptimizer.from_pretrained(exported).optimize(AutoOptimizationConfig.O2(), tmp_path / "a")
    config = AutoQuantizationConfig.avx2(is_static=False)
    ORTQuantizer.from_pretrained(exported).quantize(config, tmp_path / "b")
    for each, limit in (
        (exported, 1e-4), (kind.from_pretrained(tmp_path / "a"), 1e-4),
        (kind.from_pretrained(tmp_path / "b"), 0.2),
    ):  # fmt: skip
        torch.testing.assert_close(each(**given).logits, expected, rtol=0, atol=limit)
    with pytest.raises(UnsupportedInput, match=r"takes no colours"):
        exported(**given, colours=torch.zeros(2))


def test_wrong_kinds_and_missing_inputs_are_told_by_name() -> None:
    ours, given = ort_model("classes"), call("classes", 2, 6)
    with pytest.raises(TypeError, match=r"input_ids=\[\[1, 2\]\]: expected a torch.Tensor or a nu"):
        ours(input_ids=[[1, 2]])
    with pytest.raises(InputError, match=r"model\.onnx needs input_ids"):
        ours(attention_mask=given["attention_mask"])
    with pytest.raises(UnsupportedInput, match=r"input_ids is of torch.float32"):
        ours(input_ids=given["input_ids"].float())
    with pytest.raises(UnsupportedInput, match=r"pixel_values is of torch.int64"):
        ort_model("images")(torch.zeros(1, 3, 12, 12, dtype=torch.int64))
    with pytest.raises(
        ExecutionError, match=r"(?s)input_ids\[2, 6\], attention_mask\[2, 5\].*help"
    ):
        ours(input_ids=given["input_ids"], attention_mask=given["attention_mask"][:, 1:])
    with pytest.raises(ExecutionError, match=r"pixel_values\[1, 12, 12\]"):
        ort_model("images")(torch.zeros(1, 12, 12))


def test_a_batch_without_rows_is_told() -> None:
    with pytest.raises(ExecutionError, match=r"input_ids\[0, 5\]"):
        ort_model("classes")(input_ids=torch.zeros(0, 5, dtype=torch.int64))


def test_the_ways_of_a_gpus_tensors_give_the_same_where_a_cpu_can_go_them() -> None:
    for name in ("classes", "gpt2"):
        session = next(iter(ort_model(name).sessions.values()))
        feeds = {}
        for value in session.inputs.values():
            sizes = [size if isinstance(size, int) else 3 for size in value.shape]
            if value.name == "attention_mask" and name == "gpt2":
                sizes[1] = 6
            feeds[value.name] = torch.ones(sizes).to(value.dtype)
        expected = session.run(feeds)
        for way in (session._bound, session._copied):
            for found, its in zip(way(feeds), expected, strict=True):
                assert torch.equal(found, its)


# --- no training --------------------------------------------------------------------------------


def test_training_and_gradients_are_refused_and_ortmodule_is_named() -> None:
    ours = ort_model("images")
    assert ours.eval() is ours
    assert ours.train(False) is ours
    assert ours.requires_grad_(False) is ours
    assert not ours.training
    for ask in (
        ours.train,
        ours.parameters,
        ours.named_parameters,
        ours.state_dict,
        ours.requires_grad_,
    ):
        with pytest.raises(RuntimeError, match=r"ortrain\.ORTModule"):
            ask()
    image = torch.zeros(1, 3, 12, 12, requires_grad=True)
    with pytest.raises(UnsupportedInput, match=r"(?s)requires a gradient.*ortrain\.ORTModule"):
        ours(image)
    with torch.no_grad():
        assert ours(image).logits.shape == (1, 5)


def test_it_stays_on_its_device_and_in_its_precision() -> None:
    ours = ort_model("classes")
    assert ours.device == torch.device("cpu")
    assert ours.dtype is torch.float32
    assert ours.to("cpu") is ours
    assert ours.cpu() is ours
    assert ours.to(torch.float32) is ours
    assert ours.to(device=torch.device("cpu"), dtype=torch.float32) is ours
    for elsewhere in ("cuda", "meta"):
        with pytest.raises(NotServed, match=r"ortrain\.ORTModule"):
            ours.to(elsewhere)
    with pytest.raises(NotServed, match=r"its file computes in torch.float32"):
        ours.to(torch.float16)
    meta: dict[str, Tensor] = {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device="meta")}
    with pytest.raises(UnsupportedInput, match=r"(?s)on meta, the model on cpu.*ORTModule"):
        ours(**meta)


def test_what_a_model_says_of_itself() -> None:
    ours = ort_model("classes")
    assert isinstance(ours, ORTModelForSequenceClassification)
    assert repr(ours) == "ORTModelForSequenceClassification(model.onnx, CPUExecutionProvider)"
    assert not ours.can_generate()
    assert ours.main_input_name == "input_ids"
    assert ort_model("images").main_input_name == "pixel_values"
    assert ort_model("letters").main_input_name == "input_values"
    assert ours.config.model_type == "bert"
    assert ours.folder == folder("classes")
    assert os.fspath(ours) == str(folder("classes"))
