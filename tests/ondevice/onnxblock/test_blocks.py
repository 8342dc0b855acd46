"""Blocks on a base: what they append, compute and refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortrain.errors import GraphError, StateError
from ortrain.ondevice import onnxblock
from ortrain.ondevice.onnxblock import _graph_utils, blocks
from tests.ondevice.onnxblock.models import Heads, close, floats


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


class Calling(onnxblock.ForwardBlock):
    """Calls a function as its build."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def build(self, *names: str) -> Any:
        return self.function(*names)


def computed(
    function: Callable[..., Any], *arrays: np.ndarray, opset: int | None = None, **more: Any
) -> list[Any]:
    """What a function of names computes of inputs x0, x1, …, on an empty base."""
    names = [f"x{i}" for i in range(len(arrays))]
    with onnxblock.empty_base(opset) as accessor:
        for name, array in zip(names, arrays, strict=True):
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            value = helper.make_tensor_value_info(name, dtype, array.shape)
            accessor.model.graph.input.append(value)
        block = Calling(function)
        block(*names)
    return run(block.to_model_proto(), {**dict(zip(names, arrays, strict=True)), **more})


X, Y = floats(4, 3), floats(4, 3, seed=4)
POSITIVE = np.abs(X) + 0.5


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    ("block", "inputs", "expected"),
    [
        (blocks.Add(), [X, Y], X + Y),
        (blocks.Sub(), [X, Y], X - Y),
        (blocks.Mul(), [X, Y], X * Y),
        (blocks.Div(), [X, POSITIVE], X / POSITIVE),
        (blocks.Pow(3.0), [X], X**3),
        (blocks.ReduceMean(), [X], X.mean(keepdims=True)),
        (blocks.ReduceMean(keepdims=False), [X], X.mean()),
        (blocks.ReduceSum(), [X], X.sum(keepdims=True)),
        (blocks.ReduceSum(keepdims=False), [X], X.sum()),
        (blocks.Sigmoid(), [X], 1 / (1 + np.exp(-X))),
        (blocks.Log(), [POSITIVE], np.log(POSITIVE)),
        (blocks.Neg(), [X], -X),
        (blocks.Abs(), [X], np.abs(X)),
        (blocks.Clip(), [X], X),
        (blocks.Clip(-0.5), [X], X.clip(-0.5)),
        (blocks.Clip(clip_max=0.5), [X], X.clip(None, 0.5)),
        (blocks.Clip(-0.5, 0.5), [X], X.clip(-0.5, 0.5)),
        (blocks.ReduceAllL2(), [X, Y], np.sqrt((X**2).sum() + (Y**2).sum())[None]),
        (blocks.Cast(TensorProto.INT64), [X * 10], (X * 10).astype(np.int64)),
        (blocks.PassThrough(), [X], X),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, onnxblock.Block) else "",
)
def test_a_block_of_one_operator_computes_it(
    block: onnxblock.Block, inputs: list[np.ndarray], expected: np.ndarray, opset: int
) -> None:
    (found,) = computed(block, *inputs, opset=opset)
    assert found.shape == expected.shape
    close(found, expected)


def test_a_block_may_be_called_several_times_and_appends_each_time() -> None:
    add, constant = blocks.Add(), blocks.Constant(2.0)
    (found,) = computed(lambda x: add(add(x, constant()), constant()), X)
    close(found, X + 4)


def test_a_label_encoder_maps_keys_to_values() -> None:
    block = blocks.LabelEncoder(keys_strings=["cat", "dog"], values_int64s=[4, 7], default_int64=-3)
    (found,) = computed(block, np.array(["dog", "owl", "cat"], dtype=object).astype(str))
    assert found.tolist() == [7, -3, 4]


def test_tensors_become_a_sequence() -> None:
    (found,) = computed(blocks.SequenceConstruct(), X, Y)
    close(np.stack(found), np.stack([X, Y]))


def test_several_values_pass_through() -> None:
    close(computed(blocks.PassThrough(), X, Y), [X, Y])


@pytest.mark.parametrize("name", [None, "target"])
def test_a_new_input_is_like_any_value(name: str | None) -> None:
    def build(x: str) -> str:
        hidden = blocks.ReduceSum()(x)
        like = blocks.InputLike(hidden)(name)
        assert like == (name or "input")
        return blocks.Add()(x, like)

    (found,) = computed(build, X, **{name or "input": np.float32([[3]])})
    close(found, X + 3)


def test_a_linear_layer_has_initializers_that_a_seed_decides() -> None:
    models = []
    for _ in range(2):
        np.random.seed(5)  # noqa: NPY002
        with onnxblock.empty_base() as accessor:
            value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])
            accessor.model.graph.input.append(value)
            block = Calling(blocks.Linear(3, 6, alpha=0.5, beta=2.0))
            block("x")
            models.append(block.to_model_proto())
    assert models[0] == models[1]
    weight, bias = map(onnx.numpy_helper.to_array, models[0].graph.initializer)
    assert weight.shape == (3, 6)
    assert 0.4 < np.abs(weight).max() <= 3**-0.5
    close(run(models[0], {"x": X})[0], 0.5 * X @ weight + 2 * bias)
    (without,) = computed(blocks.Linear(3, 6, bias=False), X)
    assert without.shape == (4, 6)


@pytest.mark.parametrize("name", ["MSELoss", "L1Loss", "BCEWithLogitsLoss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("opset", [13, 18])
def test_losses_of_elements_are_those_of_pytorch(name: str, reduction: str, opset: int) -> None:
    target = np.random.default_rng(4).uniform(size=(4, 3)).astype(np.float32)
    block = getattr(onnxblock.loss, name)(reduction=reduction)
    (found,) = computed(block, X * 30, opset=opset, target=target)
    reference = getattr(nn, name)(reduction=reduction)
    close(found, reference(torch.tensor(X * 30), torch.tensor(target)))


def test_binary_cross_entropy_takes_weights_in_the_old_order() -> None:
    weight, positive = floats(3) ** 2, floats(3, seed=5) ** 2
    (found,) = computed(
        onnxblock.loss.BCEWithLogitsLoss(weight, "sum", positive), X, target=(Y > 0).astype("f")
    )
    reference = nn.BCEWithLogitsLoss(
        torch.tensor(weight), reduction="sum", pos_weight=torch.tensor(positive)
    )
    close(found, reference(torch.tensor(X), torch.tensor((Y > 0).astype("f"))))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_images_takes_class_weights_and_an_index_to_ignore(reduction: str) -> None:
    scores, weight = floats(2, 3, 4, 5), np.array([1.0, 0.5, 2.0])
    labels = np.random.default_rng(4).integers(0, 3, (2, 4, 5))
    block = onnxblock.loss.CrossEntropyLoss(weight, reduction, ignore_index=1)
    (found,) = computed(lambda x: block(x, labels_name="classes"), scores, classes=labels)
    reference = nn.CrossEntropyLoss(
        torch.tensor(weight).float(), ignore_index=1, reduction=reduction
    )
    close(found, reference(torch.tensor(scores), torch.tensor(labels)))


def test_two_losses_of_one_target_share_its_input() -> None:
    def build(x: str) -> str:
        return blocks.Add()(onnxblock.loss.MSELoss()(x), onnxblock.loss.L1Loss()(x))

    (found,) = computed(build, X, target=Y)
    close(found, ((X - Y) ** 2).mean() + np.abs(X - Y).mean())


# -- blocks of the user's own ----------------------------------------------------------------------


class Dice(onnxblock.Block):
    """As scripts have it: their own target, initializers and names."""

    def __init__(self) -> None:  # without that of Block
        self.sum = blocks.ReduceSum(keepdims=True)
        self.mean = blocks.ReduceMean(keepdims=False)
        self.epsilon = blocks.Constant(1e-4)

    def build(self, name: str, target_name: str = "target") -> str:
        if not _graph_utils.node_arg_exists(self.base, target_name):
            target = onnx.ValueInfoProto()
            target.CopyFrom(_graph_utils.get_output_from_output_name(self.base, name))
            target.name = target_name
            self.base.graph.input.append(target)
        two = _graph_utils.generate_graph_name("two")
        one = _graph_utils.generate_graph_name("two")
        for each, value in ((two, 2.0), (one, 1.0)):
            tensor = helper.make_tensor(each, TensorProto.FLOAT, [1], [value])
            self.base.graph.initializer.append(tensor)
        mul, add = blocks.Mul(), blocks.Add()
        both = mul(two, self.sum(mul(name, target_name)))
        total = add(add(self.sum(name), self.sum(target_name)), self.epsilon())
        return self.mean(blocks.Sub()(one, blocks.Div()(both, total)))


def test_a_block_of_scripts_needs_no_constructor_of_ours() -> None:
    heads, x, target = Heads(), floats(5, 4), np.abs(floats(5, 3))
    with onnxblock.base(heads.as_onnx()):
        loss = Calling(Dice())
        loss("output1")
    (found,) = run(loss.to_model_proto(), {"input": x, "target": target})
    output = heads(torch.tensor(x))[0].detach().numpy()
    close(found, 1 - 2 * (output * target).sum() / (output.sum() + target.sum() + 1e-4))


def test_shapes_on_the_base_are_inferred_in_a_copy() -> None:
    with onnxblock.base(Heads().as_onnx()) as accessor:
        before = accessor.model.SerializeToString()
        typed = blocks.Neg().infer_shapes_on_base()
        assert accessor.model.SerializeToString() == before
    (hidden,) = (v for v in typed.graph.value_info if v.name == "hidden")
    dims = [d.dim_param or d.dim_value for d in hidden.type.tensor_type.shape.dim]
    assert dims == ["batch", 8]
    assert len(typed.graph.initializer) == 6


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = Heads().as_onnx()
    before = model.SerializeToString()
    with onnxblock.base(model, "heads.onnx") as accessor:
        Calling(onnxblock.loss.MSELoss())("output2")
        assert accessor.has_path
        assert accessor.path == "heads.onnx"
        assert [o.name for o in accessor.model.graph.output] == ["MSELoss/ReduceMean_2"]
    assert model.SerializeToString() == before


def test_weights_of_any_size_are_not_looked_at() -> None:
    # A tensor whose data is elsewhere: what would read it fails.
    model = Heads().as_onnx()
    weight = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(weight, "missing.data")
    weight.ClearField("raw_data")
    with onnxblock.base(model):
        Calling(onnxblock.loss.MSELoss())("output1")


# -- wrong use -------------------------------------------------------------------------------------


def test_a_block_outside_of_a_base_is_refused() -> None:
    with pytest.raises(StateError, match="called outside of a base"):
        blocks.Add()("a", "b")


def test_a_base_inside_a_base_is_refused_and_leaves_the_outer_one() -> None:
    with onnxblock.empty_base() as outer:
        with pytest.raises(StateError, match="inside another"), onnxblock.empty_base():
            pass
        with pytest.raises(StateError, match="inside another"), onnxblock.base(outer.model):
            pass
        assert blocks.Constant(1.0)() in {t.name for t in outer.model.graph.initializer}
    with onnxblock.empty_base() as another:
        assert another.model.graph != outer.model.graph
        assert not another.has_path


def test_an_error_inside_leaves_the_base() -> None:
    with pytest.raises(GraphError), onnxblock.empty_base():
        blocks.Neg()("missing")
    with onnxblock.empty_base():
        blocks.Constant(1.0)()


@pytest.mark.parametrize(
    "block", [blocks.Neg(), onnxblock.loss.MSELoss(), blocks.InputLike("outptu1")]
)
def test_a_name_that_does_not_exist_is_refused_with_those_near(block: onnxblock.Block) -> None:
    names = [] if isinstance(block, blocks.InputLike) else ["outptu1"]
    with (
        onnxblock.base(Heads().as_onnx()),
        pytest.raises(GraphError, match=r"no value 'outptu1'\n.*it has output1"),
    ):
        block(*names)


def test_a_model_is_asked_for_after_the_call() -> None:
    with pytest.raises(StateError, match=r"Calling.to_model_proto\(\) before Calling was called"):
        Calling(blocks.Neg()).to_model_proto()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes an onnx.ModelProto, not str"), onnxblock.base("x"):  # type: ignore[arg-type]
        pass


def test_a_build_that_returns_no_name_is_refused() -> None:
    with onnxblock.empty_base(), pytest.raises(TypeError, match="build returned None"):
        Calling(lambda: None)()


@pytest.mark.parametrize("block", [Calling(blocks.PassThrough()), onnxblock.loss.MSELoss()])
def test_a_value_whose_dtype_nobody_knows_is_refused(block: onnxblock.Block) -> None:
    with onnxblock.base(Heads().as_onnx()) as accessor:
        accessor.model.opset_import.append(helper.make_opsetid("mine", 1))
        node = helper.make_node("Mystery", ["output1"], ["mystery"], domain="mine")
        accessor.model.graph.node.append(node)
        with pytest.raises(GraphError, match="the dtype of 'mystery' is not known"):
            block("mystery")
        value = helper.make_tensor_value_info("mystery", TensorProto.FLOAT, ["batch", 3])
        accessor.model.graph.value_info.append(value)
        block("mystery")


def test_a_node_that_is_not_valid_is_refused_and_names_its_block() -> None:
    class Wrong(onnxblock.Block):
        def build(self, name: str) -> str:
            node = helper.make_node("Transpose", [name], ["turned"], perm=[0, 1, 2])
            self.base.graph.node.append(node)
            return "turned"

    with (
        onnxblock.base(Heads().as_onnx()),
        pytest.raises(GraphError, match="Wrong left a model that is not valid"),
    ):
        Wrong()("output1")


def test_a_target_whose_name_is_of_another_dtype_is_refused() -> None:
    with (
        onnxblock.base(Heads().as_onnx()),
        pytest.raises(GraphError, match=r"a value 'hidden' of another dtype\n.*float.*int64"),
    ):
        onnxblock.loss.CrossEntropyLoss()("output1", labels_name="hidden")


def test_a_library_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="no library of operators"),
        onnxblock.custom_op_library(tmp_path / "missing.so"),
    ):
        pass
    (tmp_path / "text.so").write_text("no library")
    with (
        pytest.raises(GraphError, match="is no library of operators"),
        onnxblock.custom_op_library(tmp_path / "text.so"),
    ):
        pass
