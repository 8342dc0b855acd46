"""``Objective``: the loss that a model is trained on for its quantization, as part of its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.deploy.equivalence.predictions import IGNORED
from ortrain.deploy.equivalence.tasks import OF_TOKENS, TASKS, heads
from ortrain.deploy.quantization.tuning.settings import FineTuning
from ortrain.errors import InputError, listing
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ondevice import contract
from ortrain.program import Program, Role, set_role

Array = np.ndarray

# Tasks whose labels there is a loss for; of others the outputs of the original are learnt.
_CLASSES = ("classification", "token-classification")
_LABELLED = (*_CLASSES, "regression")
# Tasks of which an output is the logits of one choice: of a class, of a word, of a position.
_CHOICES = (*_CLASSES, *OF_TOKENS, "question-answering")


@dataclass(frozen=True)
class Objective:
    """What is minimized.

    Attributes:
        kind: ``"cross entropy"``, ``"mean square of labels"``, ``"divergence"`` or
            ``"mean square"``; the latter two are of the original's outputs.
        outputs: of the model, that it is about.
        ranks: of these, where the graph does not say it.
        temperature: by which logits are divided in a divergence.
        beside: how much the original's outputs count beside labels, 0 to 1.
    """

    kind: str
    outputs: tuple[str, ...]
    ranks: tuple[int, ...]
    temperature: float = 1.0
    beside: float = 0.0

    @classmethod
    def of(
        cls,
        settings: FineTuning,
        task: str | None,
        outputs: Mapping[str, Array],
        labels: Array | None,
    ) -> Objective:
        """The objective of a task.

        Args:
            settings: which loss is asked for.
            task: of ``TASKS``; None for a model that predicts nothing that is known.
            outputs: of the original, for one batch.
            labels: of all rows, or None.

        Raises:
            InputError: labels are asked for and there are none, or no loss of them; or the model
                has no output that could be learnt.
        """
        names = heads(task, outputs) if task is not None and TASKS[task] else None
        there = labels is not None and task in _LABELLED and names is not None
        if settings.loss == "labels" and not there:
            raise InputError(
                "loss='labels', and the training data have none that there is a loss for",
                because="there are no labels" if labels is None else f"the task is {task}",
                help=f"give labels of {' or '.join(_LABELLED)}, or leave loss at 'auto'",
            )
        if there and settings.loss != "distillation":
            assert names is not None
            kind = "cross entropy" if task in _CLASSES else "mean square of labels"
            beside = settings.distillation if settings.loss == "auto" else 0.0
            return cls(kind, names, _ranks(names, outputs), settings.temperature, beside)
        if names is not None and task in _CHOICES:
            return cls("divergence", names, _ranks(names, outputs), settings.temperature)
        floating = tuple(
            name for name, array in outputs.items() if array.dtype == np.float32 and array.size
        )
        if not (names or floating):
            raise InputError(
                "the model has no output that could be learnt",
                because=f"its outputs are {listing([*outputs])}, none of them float32",
                help="train it in float32, and quantize the result",
            )
        chosen = names or floating
        return cls("mean square", chosen, _ranks(chosen, outputs))

    @property
    def told(self) -> str:
        """What is minimized, in words."""
        if not self.beside:
            return self.kind
        return f"{1 - self.beside:g} {self.kind} + {self.beside:g} {self._original}"

    @property
    def _original(self) -> str:
        """What the original's outputs are learnt by."""
        if not self.of_labels:
            return self.kind
        return "divergence" if self.kind == "cross entropy" else "mean square"

    @property
    def of_labels(self) -> bool:
        """Whether labels are what is learnt."""
        return self.kind in ("cross entropy", "mean square of labels")

    def targets(self, outputs: Mapping[str, Array], labels: Array | None) -> dict[str, Array]:
        """What the loss takes of one batch.

        Args:
            outputs: of the original.
            labels: of the batch's rows.

        Raises:
            InputError: the labels do not fit the outputs.
        """
        if not self.of_labels:
            return {_input(name): outputs[name] for name in self.outputs}
        (name,) = self.outputs
        found = self._of_labels(name, outputs, labels)
        if self.beside:
            found[_input(name, beside=True)] = outputs[name]
        return found

    def _of_labels(
        self, name: str, outputs: Mapping[str, Array], labels: Array | None
    ) -> dict[str, Array]:
        assert labels is not None
        if self.kind == "cross entropy":
            return {_input(name): _classes(labels, outputs[name].shape)}
        shape = outputs[name].shape
        if labels.size != outputs[name].size:
            raise InputError(
                f"labels of shape {list(labels.shape)} do not fit the output {name} {list(shape)}",
                help="give as many numbers for each row as the model gives",
            )
        return {_input(name): labels.reshape(shape).astype(np.float32)}

    def expect(self, labels: Array, outputs: Mapping[str, Array]) -> None:
        """Raises where the classes of some rows are not those of the model.

        Args:
            labels: of the rows.
            outputs: of the original, for any batch.

        Raises:
            InputError: they are not.
        """
        if self.kind == "cross entropy":
            classes = outputs[self.outputs[0]].shape[-1]
            _classes(labels, (*labels.shape, classes))

    def attach(self, program: Program) -> None:
        """Adds the loss to a program, and its inputs.

        Args:
            program: whose user outputs have the names of :attr:`outputs`.
        """
        values = {value.name or "": value for value in program.outputs(Role.USER_OUTPUT)}
        with Builder(program.graph, opset=program.opset, prefix="loss") as op:
            losses = [
                self._loss(op, values[name], name, rank)
                for name, rank in zip(self.outputs, self.ranks, strict=True)
            ]
            total = losses[0]
            for each in losses[1:]:
                total = op.Add(total, each)
            if len(losses) == 1:
                total = op.Identity(total)
        total.name, total.shape = contract.LOSS, ir.Shape([])
        program.graph.outputs.append(set_role(total, Role.LOSS))

    def _loss(self, op: Builder, output: ir.Value, name: str, rank: int) -> Any:
        if output.shape is None:
            output.shape = ir.Shape([None] * rank)
        loss = self._of(self.kind, op, output, _input(name))
        if not self.beside:
            return loss
        original = self._of(self._original, op, output, _input(name, beside=True))
        return op.Add(loss * (1 - self.beside), original * self.beside)

    def _of(self, what: str, op: Builder, output: ir.Value, target_name: str) -> Any:
        graph = op.graph
        assert graph is not None
        dims = shapes.dims(output) or ()
        known = list(dims)
        kind, shape = ir.DataType.FLOAT, known
        if what == "cross entropy":
            kind, shape = ir.DataType.INT64, known[:-1]
        target = ir.Value(name=target_name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        graph.inputs.append(set_role(target, Role.USER_INPUT))
        if what == "cross entropy":
            places = len(known) - 1
            if places > 1:  # classes come second in ONNX
                output = op.Transpose(output, perm=[0, places, *range(1, places)])
            return op.SoftmaxCrossEntropyLoss(
                output, target, None, reduction="mean", ignore_index=IGNORED
            )
        if what == "divergence":
            wanted = op.LogSoftmax(target * (1 / self.temperature), axis=-1)
            said = op.LogSoftmax(output * (1 / self.temperature), axis=-1)
            each = op.ReduceSum(op.Exp(wanted) * (wanted - said), [-1], keepdims=0)
            # Gradients of softened classes shrink with the square of the temperature (Hinton et
            # al. 2015, arXiv:1503.02531).
            return _mean(op, each, dims) * self.temperature**2
        apart = output - target
        square = apart * apart
        if len(known) > 2:
            square = op.ReduceMean(square, [-1], keepdims=0)
        return _mean(op, square, dims)


def _ranks(names: Sequence[str], outputs: Mapping[str, Array]) -> tuple[int, ...]:
    return tuple(outputs[name].ndim for name in names)


def _mean(op: Builder, each: ir.Value, dims: Sequence[shapes.Dim]) -> Any:
    """The mean over rows, or over their positions, those of padding left out."""
    graph = op.graph
    assert graph is not None
    mask = next((value for value in graph.inputs if value.name == "attention_mask"), None)
    sizes = None if mask is None else shapes.dims(mask)
    if mask is None or sizes is None or len(dims) < 3 or tuple(dims[:2]) != tuple(sizes):
        return op.ReduceMean(each, None, keepdims=0)
    if len(dims) > 3:
        each = op.ReduceMean(each, list(range(2, len(dims) - 1)), keepdims=0)
    weight = op.cast(mask, ir.DataType.FLOAT)
    count = op.Max(op.ReduceSum(weight, None, keepdims=0), 1.0)
    return op.ReduceSum(each * weight, None, keepdims=0) / count


def _input(output: str, *, beside: bool = False) -> str:
    return f"wanted.{output}.original" if beside else f"wanted.{output}"


def _classes(labels: Array, shape: Sequence[int]) -> Array:
    """Labels of classes as wide as the logits, which may be padded further."""
    classes, wanted = shape[-1], tuple(shape[:-1])
    if labels.ndim != len(wanted) or labels.dtype.kind not in "iub":
        raise InputError(
            f"labels of shape {list(labels.shape)} and type {labels.dtype} are no classes of the "
            f"logits {list(shape)}",
            help="give the number of a class for each prediction",
        )
    found = np.full(wanted, IGNORED, np.int64)
    kept = tuple(slice(0, min(a, b)) for a, b in zip(wanted, labels.shape, strict=True))
    found[kept] = labels[kept]
    none = (found == IGNORED) & (labels.ndim > 1)
    wrong = (found >= classes) | ((found < 0) & ~none)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise InputError(
            f"row {at[0]} of a batch of the training data has the label {int(found[at])}, which is "
            "no class of the model",
            because=f"it has {classes} classes, 0 to {classes - 1}",
            help="correct the label, or give the model that it belongs to",
        )
    return found
