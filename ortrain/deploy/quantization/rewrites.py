"""``Rewrites``: the quantized models of a folder's files, by their configurations, and variants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortrain.deploy.model_folder import ModelFolder, save_model
from ortrain.deploy.quantization import constants, graph_nodes, preparation
from ortrain.deploy.quantization.chain import Arrays, Chain
from ortrain.deploy.quantization.configuration import QuantizationConfig
from ortrain.deploy.quantization.half_precision import HalfPrecisionConfig, halved
from ortrain.deploy.quantization.inputs import described, fed
from ortrain.deploy.quantization.preprocessor import QuantizationPreprocessor
from ortrain.deploy.quantization.rewriting import Ranges, quantized
from ortrain.deploy.quantization.sensitivity import Sensitivity, measure
from ortrain.deploy.quantization.weight_only import WeightOnlyConfig, in_blocks

Config = QuantizationConfig | WeightOnlyConfig | HalfPrecisionConfig
Batches = Sequence[Mapping[str, np.ndarray]]

# Nodes that only move values about change nothing by themselves.
_MOVING = {
    "AveragePool",
    "Clip",
    "Concat",
    "Flatten",
    "MaxPool",
    "Pad",
    "Relu",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}


class Rewrites:
    """Makes quantized models of a folder's files.

    Args:
        source: the folder.
        ranges: of activations; None without calibration. With several files, their names begin
            with the file's.
    """

    def __init__(self, source: ModelFolder, ranges: Ranges | None) -> None:
        self._source, self._ranges = source, ranges
        self._several = len(source.files) > 1

    def chosen(
        self, file: str, config: Config, preprocessor: QuantizationPreprocessor | None = None
    ) -> Config:
        """The configuration of one file: with nodes of its own, and with those that passes choose.

        Args:
            file: its name.
            config: of all files; stays as it is.
            preprocessor: chooses nodes.
        """
        model = self._source.load(file)
        preparation.prepare(model, gemm=False, wanted=lambda _: False)
        names = {node.name for node in graph_nodes.nodes(model)}
        each = copy.deepcopy(config)
        if self._several:  # nodes of other files are named as well
            for argument in ("nodes_to_quantize", "nodes_to_exclude"):
                if hasattr(each, argument):
                    given = getattr(each, argument)
                    setattr(each, argument, [name for name in given if name in names])
        if preprocessor is not None:
            more, less = preprocessor.collect(model)
            if hasattr(each, "nodes_to_quantize"):
                each.nodes_to_quantize = sorted({*each.nodes_to_quantize, *more})
            each.nodes_to_exclude = sorted({*each.nodes_to_exclude, *less})
        return each

    def model(
        self,
        file: str,
        config: Config,
        weights: Mapping[str, np.ndarray] | None = None,
        ranges: Ranges | None = None,
    ) -> ir.Model:
        """A file's model, quantized.

        Args:
            file: its name.
            config: of this file.
            weights: initializer → what it is instead; None for the file's own.
            ranges: activation → its range instead of the calibrated one.

        Raises:
            InputError: it cannot be quantized so.
            ValueError: a node that is named is not there.
        """
        model = self._source.load(file)
        if weights:
            preparation.prepare(model, gemm=False, wanted=lambda _: False)  # constants get names
            for name, array in weights.items():
                value = model.graph.initializers[name]
                value.const_value = ir.Tensor(array, name=name)
        if isinstance(config, WeightOnlyConfig):
            return in_blocks(model, config, file)
        if isinstance(config, HalfPrecisionConfig):
            return halved(model, config, file)
        if not config.is_static:
            return quantized(model, config, None, file)[0]
        own = dict(self._ranges or {})
        if self._several:
            prefix = f"{file}/"
            own = {n.removeprefix(prefix): r for n, r in own.items() if n.startswith(prefix)}
        return quantized(model, config, {**own, **(ranges or {})}, file)[0]

    def sensitivities(
        self, configs: Mapping[str, Config], batches: Batches, mode: str = "alone"
    ) -> list[Sensitivity]:
        """How much each node's quantization changes the outputs, those that do most first.

        Args:
            configs: file → its configuration.
            batches: to run the models on.
            mode: ``"alone"`` or ``"excluded"``.
        """
        found: list[Sensitivity] = []
        feeds = self._feeds(batches)
        for file, config in configs.items():
            if isinstance(config, HalfPrecisionConfig):
                continue
            variants = [*self._variants(file, config, mode)]
            found += measure(self._source.path / file, variants, feeds[file])
        return sorted(found, key=lambda each: (each.signal_to_noise, -each.largest))

    def _variants(
        self, file: str, config: Config, mode: str
    ) -> Iterator[tuple[str, str, Callable[[Path], Path]]]:
        for node, operator in self._candidates(file, config):
            changed = copy.deepcopy(config)
            if mode == "alone":
                assert not isinstance(changed, HalfPrecisionConfig)
                changed.nodes_to_quantize = [node]
            else:
                changed.nodes_to_exclude = [*changed.nodes_to_exclude, node]

            def write(folder: Path, changed: Config = changed) -> Path:
                save_model(self.model(file, changed), folder / file)
                return folder / file

            yield node, operator, write

    def _candidates(self, file: str, config: Config) -> list[tuple[str, str]]:
        model = self._source.load(file)
        preparation.prepare(model, gemm=False, wanted=lambda _: False)
        assert not isinstance(config, HalfPrecisionConfig)
        operators = set(config.operators_to_quantize) - _MOVING
        if "MatMul" in operators:
            operators |= {"Attention", "FusedGemm", "FusedMatMul"}
            operators |= set() if config.is_static else {"Gemm"}
        chosen, excluded = set(config.nodes_to_quantize), set(config.nodes_to_exclude)
        return [
            (node.name or "", node.op_type)
            for node in constants.quantizable(model, static=config.is_static)
            if node.op_type in operators
            and node.name not in excluded
            and (not chosen or node.name in chosen)
        ]

    def _feeds(self, batches: Batches) -> dict[str, list[Arrays]]:
        """File → its batches; what one file gives another one is computed."""
        if not self._several:
            return {self._source.files[0]: [dict(batch) for batch in batches]}
        sessions = {
            file: onnxruntime.InferenceSession(
                self._source.path / file, providers=["CPUExecutionProvider"]
            )
            for file in self._source.files
        }
        inputs = {file: described(session) for file, session in sessions.items()}
        found: dict[str, list[Arrays]] = {file: [] for file in self._source.files}

        def run(file: str) -> Callable[[Arrays], Arrays]:
            def call(batch: Arrays) -> Arrays:
                feeds = fed(batch, inputs[file])
                found[file].append(feeds)
                names = [value.name for value in sessions[file].get_outputs()]
                return dict(zip(names, sessions[file].run(names, feeds), strict=True))

            return call

        chain = Chain(inputs)
        for batch in batches:
            chain.run(dict(batch), {file: run(file) for file in self._source.files})
        return found
