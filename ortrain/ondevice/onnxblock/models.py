"""``ForwardBlock`` and ``TrainingBlock``: blocks that make models of what they are stacked on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from ortrain.errors import StateError
from ortrain.ondevice import contract
from ortrain.ondevice.making.artifacts import make
from ortrain.ondevice.making.base import check_model, current
from ortrain.ondevice.making.block import Block, names_of
from ortrain.ondevice.making.onnx_source import from_onnx
from ortrain.ondevice.making.optim import State
from ortrain.ondevice.running.checkpoint_file import Content, Spec
from ortrain.program import Role, set_role


class ForwardBlock(Block):
    """A block whose results are the outputs of the model."""

    _model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block, and makes of what it returns the outputs of the base.

        Raises:
            StateError: there is no base around the call.
            GraphError: the model is not valid afterwards.
            TypeError: ``build`` does not return names.
        """
        accessor = current()
        output = self.build(*args, **kwargs)
        accessor.set_outputs(names_of(output))
        check_model(accessor.model, after=type(self).__name__)
        self._model = onnx.ModelProto()
        self._model.CopyFrom(accessor.model)
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """The model as it was after the call.

        Raises:
            StateError: the block was not called.
        """
        if self._model is None:
            raise _not_called(self, "to_model_proto")
        return self._model


class _Tensors(list[TensorProto]):
    """One list of :class:`Parameters`, which scripts take apart and put together again."""

    whole: Parameters


class Parameters(tuple[list[TensorProto], list[TensorProto]]):
    """The tensors of a model that are trained, and those that are frozen.

    Args:
        content: a checkpoint that has them.

    Attributes:
        buffers: what a forward in training mode changes, such as running statistics.
        model: by which a checkpoint knows the models that were made with it.
        states: those of the optimizer that was made for the trained ones; at first none.
    """

    buffers: list[TensorProto]
    model: str
    states: Sequence[State]

    def __new__(cls, content: Content) -> Parameters:
        """The pair, with all else beside it."""

        def protos(specs: Sequence[Spec]) -> _Tensors:
            tensors = content.tensors
            return _Tensors(numpy_helper.from_array(tensors[s.name], s.name) for s in specs)

        trained = [spec for spec in content.parameters if spec.requires_grad]
        frozen = [spec for spec in content.parameters if not spec.requires_grad]
        lists = protos(trained), protos(frozen)
        result = super().__new__(cls, lists)
        for each in lists:
            each.whole = result
        result.buffers = protos(content.buffers)
        result.model, result.states = content.texts["model"], ()
        return result

    @staticmethod
    def of(parameters: Sequence[Sequence[TensorProto]]) -> Parameters | None:
        """Those that a pair is of, also where it was put together again of the two lists.

        Args:
            parameters: trained and frozen; None of other lists.
        """
        if isinstance(parameters, Parameters):
            return parameters
        wholes = {id(getattr(each, "whole", None)): each for each in parameters}
        first = next(iter(wholes.values()), None)
        return first.whole if len(wholes) == 1 and isinstance(first, _Tensors) else None


class TrainingBlock(Block):
    """A block whose first result is the loss that is trained on.

    ::

        class Training(TrainingBlock):
            def __init__(self):
                super().__init__()
                self.loss = loss.CrossEntropyLoss()

            def build(self, output_name):
                return self.loss(output_name)

        block = Training()
        block.requires_grad("fc.weight")
        with base(model):
            block("output")
        training_model, eval_model = block.to_model_proto()

    The models, their inputs and outputs are those of docs/ondevice-contract.md.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: dict[str, bool] = {}
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None
        self._parameters: Parameters | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Names a parameter or an input; to be called before the block is, or in its ``build``.

        Args:
            argument_name: of an initializer; or of an input of the model, whose gradient the
                training model then returns as ``<name>_grad``, behind all other results.
            value: whether it is trained; else it is frozen. What is not named stays a constant.
        """
        self._trained[argument_name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block and, of what the base is then, the training and evaluation models.

        The base becomes the training model.

        Raises:
            StateError: there is no base around the call, or its model trains already.
            GraphError: a name does not exist, or the model is not valid or cannot be trained.
            GradientError: a gradient is needed that does not exist.
            TypeError: ``build`` does not return names.
        """
        accessor = current()
        if accessor.differentiated:
            raise StateError(
                f"{type(self).__name__} was called on a model that trains already",
                because="another training block has made it a training model",
                help="call it within a base of its own",
            )
        before = [value.name for value in accessor.model.graph.output]
        output = self.build(*args, **kwargs)
        names = names_of(output)
        accessor.set_outputs([*names, *before])
        check_model(accessor.model, after=type(self).__name__)
        known = {value.name for value in accessor.model.graph.initializer}
        inputs = {value.name for value in accessor.model.graph.input} - known
        trained = [name for name, value in self._trained.items() if value and name not in inputs]
        frozen = [name for name, value in self._trained.items() if not value and name not in inputs]
        read = [name for name, value in self._trained.items() if value and name in inputs]
        forward = from_onnx(accessor.model, trained, frozen)
        for program in (forward.training, forward.evaluation):
            set_role(program.outputs(Role.USER_OUTPUT)[0], Role.LOSS)
        programs, content = make(forward, None, (), names[1:], read)
        self._parameters = Parameters(content)
        self._models = (
            ir.to_proto(programs[contract.TRAINING_MODEL].model),
            ir.to_proto(programs[contract.EVAL_MODEL].model),
        )
        accessor.model.CopyFrom(self._models[0])
        accessor.eval_model = self._models[1]
        accessor.differentiated = True
        return output

    def parameters(self) -> Parameters:
        """The tensors that are trained, and those that are frozen, each in the models' order.

        Raises:
            StateError: the block was not called.
        """
        if self._parameters is None:
            raise _not_called(self, "parameters")
        return self._parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the evaluation model.

        Raises:
            StateError: the block was not called.
        """
        if self._models is None:
            raise _not_called(self, "to_model_proto")
        return self._models


def _not_called(block: Block, method: str) -> StateError:
    name = type(block).__name__
    return StateError(
        f"{name}.{method}() before {name} was called",
        because="the call makes the model",
        help="call the block within `with onnxblock.base(model):` first",
    )
