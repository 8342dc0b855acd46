"""Blocks of one operator, or of few."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import helper

from ortrain.ondevice.making.base import current
from ortrain.ondevice.making.block import Block

__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]


class _Binary(Block):
    op_type: ClassVar[str]

    def build(self, input_name1: str, input_name2: str) -> str:
        """The name of the result; shapes broadcast."""
        return self._node(self.op_type, [input_name1, input_name2])


class Add(_Binary):
    """The sum of two values."""

    op_type = "Add"


class Sub(_Binary):
    """The first value less the second."""

    op_type = "Sub"


class Mul(_Binary):
    """The product of two values, element by element."""

    op_type = "Mul"


class Div(_Binary):
    """The first value over the second."""

    op_type = "Div"


class _Unary(Block):
    op_type: ClassVar[str]

    def build(self, input_name: str) -> str:
        """The name of the result."""
        return self._node(self.op_type, [input_name])


class Sigmoid(_Unary):
    """1 / (1 + exp(-x))."""

    op_type = "Sigmoid"


class Log(_Unary):
    """The natural logarithm."""

    op_type = "Log"


class Neg(_Unary):
    """The value with the other sign."""

    op_type = "Neg"


class Abs(_Unary):
    """The value without its sign."""

    op_type = "Abs"


class _Reduction(Block):
    """A reduction over all axes.

    Args:
        keepdims: the result has as many axes, of size 1; else none.
    """

    op_type: ClassVar[str]

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._keepdims = keepdims

    def build(self, input_name: str) -> str:
        """The name of the result."""
        return self._node(self.op_type, [input_name], keepdims=int(self._keepdims))


class ReduceMean(_Reduction):
    """The mean over all axes."""

    op_type = "ReduceMean"


class ReduceSum(_Reduction):
    """The sum over all axes."""

    op_type = "ReduceSum"


class ReduceAllL2(Block):
    """The 2-norm of all elements of all inputs together, [1], in standard operators."""

    def build(self, *reduce_node_input_names: str) -> str:
        """The name of the norm of one value or more, of one dtype."""
        squares = [
            self._node("ReduceSumSquare", [name], keepdims=0) for name in reduce_node_input_names
        ]
        norm = self._node("Sqrt", [self._node("Sum", squares)])
        return self._node("Reshape", [norm, self._tensor("shape", np.array([1], np.int64))])


class Pow(Block):
    """A power of each element.

    Args:
        exponent: a number.
    """

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """The name of the result."""
        exponent = self._tensor("exponent", np.array(self._exponent, np.float32))
        return self._node("Pow", [pow_input_name, exponent])


class Clip(Block):
    """Each element, kept within bounds.

    Args:
        clip_min: the lower bound; by default there is none.
        clip_max: the upper bound, likewise.
    """

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = {"clip_min": clip_min, "clip_max": clip_max}

    def build(self, clip_input_name: str) -> str:
        """The name of the result."""
        bounds = [
            "" if bound is None else self._tensor(stem, np.array(bound, np.float32))
            for stem, bound in self._bounds.items()
        ]
        return self._node("Clip", [clip_input_name, *bounds])


class Constant(Block):
    """A number as an initializer: float32 [].

    Args:
        value_float: the number.
    """

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        """The name of the initializer; each call makes another."""
        return self._tensor("constant", np.array(self._value, np.float32))


class SequenceConstruct(Block):
    """Tensors as one sequence."""

    def build(self, *sequence_input_names: str) -> str:
        """The name of the sequence of these values."""
        return self._node("SequenceConstruct", sequence_input_names)


class PassThrough(Block):
    """The inputs as they are."""

    def build(self, *input_names: str) -> Any:
        """The name that it is given; of several, a tuple of them."""
        return input_names[0] if len(input_names) == 1 else input_names


class InputLike(Block):
    """A new input of the model.

    Args:
        like: the name of a value that has the dtype and shape that the input gets.
    """

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """The name of the new input: the one given, or one that is free."""
        accessor = current()
        (known,) = accessor.types([self._like])
        value = onnx.ValueInfoProto()
        value.CopyFrom(known)
        value.name = input_name or accessor.unique_name("input")
        accessor.model.graph.input.append(value)
        return value.name


class LabelEncoder(Block):
    """``ai.onnx.ml.LabelEncoder``: keys to values. One list of keys and one of values is given.

    Args:
        default_float: of a key that is not listed, where values are floats.
        default_int64: likewise, where they are integers.
        default_string: likewise, where they are strings.
        keys_floats: the keys.
        keys_int64s: the keys.
        keys_strings: the keys.
        values_floats: the values.
        values_int64s: the values.
        values_strings: the values.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: list[float] | None = None,
        keys_int64s: list[int] | None = None,
        keys_strings: list[str] | None = None,
        values_floats: list[float] | None = None,
        values_int64s: list[int] | None = None,
        values_strings: list[str] | None = None,
    ) -> None:
        super().__init__()
        attributes = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }
        self._attributes: dict[str, Any] = {
            name: v for name, v in attributes.items() if v is not None
        }

    def build(self, label_encoder_input_name: str) -> str:
        """The name of the result, of the input's shape."""
        imports = self.base.opset_import
        if not any(o.domain == "ai.onnx.ml" for o in imports):
            imports.append(helper.make_opsetid("ai.onnx.ml", 3))
        return self._node(
            "LabelEncoder", [label_encoder_input_name], domain="ai.onnx.ml", **self._attributes
        )


class Cast(Block):
    """The value in another dtype.

    Args:
        to: of ``onnx.TensorProto``.
    """

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        """The name of the result."""
        return self._node("Cast", [cast_input_name], to=self._to)


class Linear(Block):
    """alpha x W + beta b, with W [in_features, out_features] and b [out_features].

    Both begin uniformly in ±1/√in_features, by the generator that ``numpy.random.seed`` seeds.

    Args:
        in_features: columns of the input.
        out_features: columns of the result.
        bias: whether there is a b.
        alpha: factor of the product.
        beta: factor of b.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        self._shape = (in_features, out_features)
        self._bias = bias
        self._factors: dict[str, Any] = {"alpha": alpha, "beta": beta}

    def build(self, linear_input_name: str) -> str:
        """The name of the result, [N, out_features], of an input [N, in_features]."""
        operands = [linear_input_name, self._initial("linear.weight", self._shape)]
        if self._bias:
            operands.append(self._initial("linear.bias", self._shape[1:]))
        return self._node("Gemm", operands, **self._factors)

    def _initial(self, stem: str, shape: tuple[int, ...]) -> str:
        bound = 1 / math.sqrt(self._shape[0])
        values = np.random.uniform(-bound, bound, shape)  # noqa: NPY002
        return self._tensor(stem, values.astype(np.float32))
