"""Passes that choose nodes by the pattern that they are in: which stay, which are quantized."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from ortrain.deploy.model_folder import load_model
from ortrain.deploy.quantization import constants, preparation
from ortrain.kinds import expect

Chosen = tuple[set[str], set[str]]


class PreprocessorPass(ABC):
    """Chooses nodes of a graph.

    Attributes:
        logger: not used; kept for passes that were written for Optimum.
    """

    @abstractmethod
    def __call__(self, graph: ir.Graph, model: ir.Model) -> Chosen:
        """Names of nodes that are to be quantized, and of those that are not to be.

        Args:
            graph: of the model, sub-graphs included one after the other.
            model: the model; is not changed.
        """


class QuantizationPreprocessor:
    """A row of passes.

    Args:
        model_path: of the ONNX file that they look at; by default the one that is quantized.
    """

    def __init__(self, model_path: str | os.PathLike[str] | None = None) -> None:
        self.model_path = None if model_path is None else Path(model_path)
        self._passes: list[PreprocessorPass] = []

    def from_config(self, config: object) -> None:
        """Passes of a configuration file; there are none, as in Optimum."""
        del config

    def register_pass(self, target: PreprocessorPass) -> None:
        """Adds a pass behind those that are there; one that is there already is not added.

        Raises:
            TypeError: it is no pass.
        """
        expect("target", target, PreprocessorPass, "a PreprocessorPass")
        if target not in self._passes:
            self._passes.append(target)

    def collect(self, model: ir.Model | None = None) -> Chosen:
        """What all passes choose; a node that one excludes stays excluded.

        Args:
            model: to look at, with names on all of its nodes; by default the one of the path.

        Raises:
            ValueError: there is neither a model nor a path.
        """
        if model is None:
            if self.model_path is None:
                raise ValueError("there is no model: give QuantizationPreprocessor(model_path)")
            model = load_model(self.model_path)
            preparation.prepare(model, gemm=False, wanted=lambda _: False)
        quantize: set[str] = set()
        exclude: set[str] = set()
        for target in self._passes:
            for graph in model.graphs():
                more, less = target(graph, model)
                quantize |= more
                exclude |= less
        return quantize - exclude, exclude


class ExcludeLayerNormNodes(PreprocessorPass):
    """Excludes layer normalization: the operators, and what older exports write it with."""

    operators = (
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    )

    def __call__(self, graph: ir.Graph, model: ir.Model) -> Chosen:
        """The nodes of each normalization."""
        del model
        found: set[str] = set()
        for node in graph:
            if node.op_type in self.operators:
                found.add(node.name or "")
            elif node.op_type == "ReduceMean":
                found |= _names(_layer_norm(node))
        return set(), found


class ExcludeGeLUNodes(PreprocessorPass):
    """Excludes GELU: the operators, and what older exports write it with."""

    operators = ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")

    def __call__(self, graph: ir.Graph, model: ir.Model) -> Chosen:
        """The nodes of each GELU."""
        del model
        found: set[str] = set()
        for node in graph:
            if node.op_type in self.operators:
                found.add(node.name or "")
            elif node.op_type in ("Erf", "Tanh"):
                found |= _names(_gelu(node))
        return set(), found


class ExcludeNodeAfter(PreprocessorPass):
    """Excludes nodes of one operator that read the result of another.

    Args:
        parent_operator_type: the one that is read.
        operator_type_to_exclude: the one that reads.
    """

    def __init__(self, parent_operator_type: str, operator_type_to_exclude: str) -> None:
        expect("parent_operator_type", parent_operator_type, str, "the name of an operator")
        expect("operator_type_to_exclude", operator_type_to_exclude, str, "the name of an operator")
        self.parent, self.excluded = parent_operator_type, operator_type_to_exclude

    def __call__(self, graph: ir.Graph, model: ir.Model) -> Chosen:
        """The nodes that read."""
        del model
        return set(), {
            node.name or ""
            for node in graph
            if node.op_type == self.excluded
            and any(producer.op_type == self.parent for producer in _producers(node))
        }


class ExcludeNodeFollowedBy(PreprocessorPass):
    """Excludes nodes of one operator whose result another one reads.

    Args:
        operator_type_to_exclude: the one that is read.
        following_operator_type: the one that reads.
    """

    def __init__(self, operator_type_to_exclude: str, following_operator_type: str) -> None:
        expect("operator_type_to_exclude", operator_type_to_exclude, str, "the name of an operator")
        expect("following_operator_type", following_operator_type, str, "the name of an operator")
        self.excluded, self.following = operator_type_to_exclude, following_operator_type

    def __call__(self, graph: ir.Graph, model: ir.Model) -> Chosen:
        """The nodes that are read."""
        del model
        return set(), {
            node.name or ""
            for node in graph
            if node.op_type == self.excluded
            and any(reader.op_type == self.following for reader in _readers(node))
        }


class IncludeFullyConnectedNodes(PreprocessorPass):
    """Quantizes products with a constant weight: those of linear layers, with or without a bias."""

    def __call__(self, graph: ir.Graph, model: ir.Model) -> Chosen:
        """The nodes of the products."""
        del model
        linear = ("MatMul", "Gemm", "FusedMatMul")
        return {
            node.name or ""
            for node in graph
            if node.op_type in linear and constants.follows_from_constants(node.inputs[1])
        }, set()


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.inputs:
        producer = value.producer() if value is not None else None
        if producer is not None:
            yield producer


def _readers(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.outputs:
        for use in value.uses():
            yield use.node


def _names(nodes: set[ir.Node]) -> set[str]:
    return {node.name or "" for node in nodes}


def _reader(node: ir.Node, *operators: str) -> ir.Node | None:
    return next((each for each in _readers(node) if each.op_type in operators), None)


def _producer(node: ir.Node, *operators: str) -> ir.Node | None:
    return next((each for each in _producers(node) if each.op_type in operators), None)


def _layer_norm(mean: ir.Node) -> set[ir.Node]:
    """The nodes of ``(x - mean) / sqrt(mean((x - mean) ** 2) + e) * w + b``, from the mean."""
    centred = _reader(mean, "Sub")
    if centred is None or mean.inputs[0] not in centred.inputs:
        return set()
    square = _reader(centred, "Pow", "Mul")
    variance = None if square is None else _reader(square, "ReduceMean")
    shifted = None if variance is None else _reader(variance, "Add")
    root = None if shifted is None else _reader(shifted, "Sqrt")
    scaled = None if root is None else _reader(root, "Div")
    if scaled is None or centred.outputs[0] not in scaled.inputs:
        return set()
    found = {mean, centred, square, variance, shifted, root, scaled}
    weighted = _reader(scaled, "Mul")
    if weighted is not None:
        found.add(weighted)
        biased = _reader(weighted, "Add")
        if biased is not None and any(
            constants.follows_from_constants(value) for value in biased.inputs
        ):
            found.add(biased)
    return {node for node in found if node is not None}


def _gelu(curve: ir.Node) -> set[ir.Node]:
    """The nodes of ``x * (1 + erf(x / sqrt(2))) * 0.5`` or the form with tanh, from its curve."""
    shifted = _reader(curve, "Add")
    product = None if shifted is None else _reader(shifted, "Mul")
    if (
        shifted is None
        or product is None
        or not any(constants.follows_from_constants(v) for v in shifted.inputs)
    ):
        return set()
    found = {curve, shifted, product}
    half = (
        _reader(product, "Mul")
        if not any(constants.follows_from_constants(v) for v in product.inputs)
        else None
    )
    if half is not None and any(constants.follows_from_constants(value) for value in half.inputs):
        found.add(half)
    before = _producer(curve, "Div", "Mul")
    if before is not None:
        found.add(before)
        inner = _producer(before, "Add") if curve.op_type == "Tanh" else None
        cube = None if inner is None else _producer(inner, "Mul")
        power = None if cube is None else _producer(cube, "Pow", "Mul")
        found |= {node for node in (inner, cube, power) if node is not None}
    return found
