"""``Calibrator``: ranges of a graph's activations, from runs on data, in bounded memory."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes import common
from onnxruntime.quantization.calibrate import CalibrationMethod

from ortrain.deploy.model_folder import load_model
from ortrain.deploy.quantization import graph_nodes, preparation
from ortrain.deploy.quantization.configuration import (
    QuantFormat,
    QuantizationConfig,
    QuantizationMode,
    default_operators,
)
from ortrain.deploy.quantization.histogram import MASK, SIDE, Histogram
from ortrain.deploy.quantization.inputs import Inputs, described, fed
from ortrain.deploy.quantization.rewriting import ready
from ortrain.errors import ExecutionError, StateError, listing

if TYPE_CHECKING:
    from ortrain.deploy.quantization.calibration_config import CalibrationConfig

# Bytes of activations that are held at a time where each value is counted.
HELD = 256 << 20
_ENTROPY_BINS = 2048
_REDUCED = ("ReduceMin", "ReduceMax", "ReduceSum")


class Extremes:
    """The smallest and the largest value of an activation, or averages of batches' extremes."""

    def __init__(self, average: float | None = None) -> None:
        self.low, self.high, self.masked = np.inf, -np.inf, False
        self._average = average

    def add(self, low: float, high: float) -> None:
        """Joins the extremes of one more batch."""
        if low > high:  # of no values
            return
        if self._average is None or self.low > self.high:
            self.low, self.high = min(self.low, low), max(self.high, high)
        else:
            self.low += self._average * (low - self.low)
            self.high += self._average * (high - self.high)


class Calibrator:
    """Collects the ranges of one ONNX file's activations.

    Batches are added in any number of calls, and those of all calls count. Smallest and largest
    values are reduced in the graph. Where values are counted, at most 256 MiB of activations, or
    the largest one, leave the graph at a time; what is kept is a histogram of 64 KiB each.

    Args:
        path: of the file, which is read only.
        config: method and its parameters.
        operators: whose inputs and outputs have ranges; by default all that can be quantized.
        symmetric: whether ranges are symmetric around zero.
        provider: execution provider of onnxruntime.
        held: bytes of activations that may be held at a time.
    """

    def __init__(
        self,
        path: Path,
        config: CalibrationConfig,
        operators: Sequence[str] | None = None,
        *,
        symmetric: bool = False,
        provider: str = "CPUExecutionProvider",
        held: int = HELD,
    ) -> None:
        if provider not in (there := onnxruntime.get_available_providers()):
            raise ValueError(
                f"provider={provider!r}: this onnxruntime has {listing(there)}; install one that "
                "has it, or calibrate on the processor"
            )
        self.path, self.config, self.symmetric = path, config, symmetric
        self._provider, self._held = provider, held
        self._operators = list(operators or ())
        self._counted = config.method != CalibrationMethod.MinMax
        average = config.averaging_constant if config.moving_average else None
        self._average = 0.01 if config.moving_average and average is None else average
        self._extremes: dict[str, Extremes] = {}
        self._histograms: dict[str, Histogram] = {}
        self._sizes: dict[str, int] = {}
        self._graphs: _Graphs | None = None
        self.batches = 0

    @property
    def inputs(self) -> Inputs:
        """What the model takes."""
        return self._made().inputs

    def collect(self, batches: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Adds the activations of some batches.

        Args:
            batches: inputs by their names; what is no input is left out.

        Raises:
            InputError: an input is missing.
            ExecutionError: onnxruntime cannot run the model on them.
        """
        for batch in batches:
            self.run(batch)

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Adds the activations of one batch.

        Returns:
            The outputs of the model, by name.

        Raises:
            InputError: an input is missing.
            ExecutionError: onnxruntime cannot run the model on it.
        """
        graphs = self._made()
        feeds = fed(batch, graphs.inputs)
        found = graphs.statistics(feeds)
        for name in graphs.taps:
            low, high, total, *size = (found.pop(f"{name}{end}") for end in graphs.ends)
            if size:
                self._sizes[name] = max(self._sizes.get(name, 0), int(size[0]))
            extremes = self._extremes.setdefault(name, Extremes(self._average))
            empty = low > high
            low, high = float(low), float(high)  # float16 does not compare with a mask's number
            extremes.masked |= not empty and bool(not np.isfinite(total) or max(-low, high) >= MASK)
            extremes.add(low, high)
        if self._counted:
            for name, values in graphs.activations(feeds, self._sizes, self._held):
                self._histograms.setdefault(name, Histogram()).add(values)
        self.batches += 1
        return found

    def merge(self, other: Calibrator) -> None:
        """Adds what another one has collected on the same file, as in another process.

        Raises:
            StateError: ranges are averaged, which has an order.
        """
        if self._average is not None:
            raise StateError(
                "averages of batches cannot be merged", help="collect in one calibrator"
            )
        for name, extremes in other._extremes.items():
            mine = self._extremes.setdefault(name, Extremes())
            mine.add(extremes.low, extremes.high)
            mine.masked |= extremes.masked
        for name, histogram in other._histograms.items():
            self._histograms.setdefault(name, Histogram()).merge(histogram)
        self.batches += other.batches

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Activation → its lowest and its highest value.

        Those that held a NaN, an infinity or a mask's number in some batch have no range: in eight
        bits nothing would be left of the other values.

        Raises:
            ValueError: nothing has been collected.
        """
        if not self.batches:
            raise ValueError("nothing has been collected: call fit or partial_fit first")
        found = {}
        for name, extremes in self._extremes.items():
            if extremes.masked or extremes.low > extremes.high:
                continue
            low, high = self._range(name, extremes)
            if self.symmetric:
                high = max(-low, high)
                low = -high
            found[name] = (float(np.float32(low)), float(np.float32(high)))
        return found

    def close(self) -> None:
        """Removes the temporary files; what has been collected stays."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None

    def _range(self, name: str, extremes: Extremes) -> tuple[float, float]:
        config = self.config
        if config.method == CalibrationMethod.Percentile:
            share = 99.999 if config.percentile is None else config.percentile
            return self._histograms[name].percentile(share, symmetric=self.symmetric)
        if config.method == CalibrationMethod.Entropy:
            levels = config.num_quantized_bins or 128
            bins = config.num_bins or 0
            if bins <= levels:
                bins = max(_ENTROPY_BINS, 2 * levels)
            return self._histograms[name].entropy(levels, min(bins, 2 * SIDE))
        return extremes.low, extremes.high

    def _made(self) -> _Graphs:
        if self._graphs is None:
            self._graphs = _Graphs(self.path, self._operators, self._provider, self._counted)
        return self._graphs


class _Graphs:
    """The model with more outputs, in a temporary folder: extremes, or activations themselves."""

    def __init__(self, path: Path, operators: Sequence[str], provider: str, counted: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ortrain-calibration-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._provider = provider
        self.ends = ["/low", "/high", "/sum", *(["/size"] if counted else [])]
        model = load_model(path)
        graph_nodes.expect_float(model, path.name)
        static = QuantizationMode.QLinearOps
        chosen = list(operators) or sorted(
            {name for fmt in QuantFormat for name in default_operators(fmt, static)}
        )
        config = QuantizationConfig(
            is_static=True, format=QuantFormat.QDQ, operators_to_quantize=chosen
        )
        ready(model, config, path.name)
        preparation.infer(model)
        self.taps = _taps(model, set(chosen))
        self._base = self._folder / "base.onnx"
        ir.save(model, self._base, external_data="weights", size_threshold_bytes=256)
        self.outputs = [value.name or "" for value in model.graph.outputs]
        self._statistics = self._session(_reduced(ir.load(self._base), self.taps, counted))
        self.inputs = described(self._statistics)
        self._groups: list[tuple[list[str], Any]] = []
        self._sizes: dict[str, int] = {}

    def statistics(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The model's outputs, and extremes, sum and size of each activation."""
        names = [value.name for value in self._statistics.get_outputs()]
        return dict(zip(names, _run(self._statistics, names, feeds), strict=True))

    def activations(
        self, feeds: Mapping[str, np.ndarray], sizes: Mapping[str, int], held: int
    ) -> Iterable[tuple[str, np.ndarray]]:
        """Each activation, so many bytes of them at a time."""
        if any(sizes[name] > self._sizes.get(name, -1) for name in self.taps):
            # By a half more, so that slightly longer batches do not group them anew each time.
            self._sizes = {name: sizes[name] * 3 // 2 for name in self.taps}
            self._groups = [(names, None) for names in _grouped(self.taps, self._sizes, held // 4)]
        for index, (names, session) in enumerate(self._groups):
            if session is None:
                session = self._session(_tapped(ir.load(self._base), names))
                self._groups[index] = names, session
            own = [value.name for value in session.get_outputs()]
            yield from zip(names, _run(session, own, feeds), strict=True)

    def close(self) -> None:
        self._groups = []
        self._remove()

    def _session(self, model: ir.Model) -> Any:
        path = self._folder / "taps.onnx"
        ir.save(model, path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Values must be those of the nodes as they stand, not of what they are fused into; and
        # weights stay mapped, so that several sessions share them.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            return onnxruntime.InferenceSession(path, options, providers=[self._provider])
        except Exception as error:  # onnxruntime's own classes, one for each status
            raise ExecutionError(
                "onnxruntime cannot load the model for calibration",
                because=str(error).splitlines()[0],
                help="see whether it runs as it is",
            ) from error


def _run(session: Any, names: list[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    try:
        found: list[np.ndarray] = session.run(names, dict(feeds))
        return found
    except Exception as error:  # onnxruntime's own classes, one for each status
        shapes = {name: array.shape for name, array in feeds.items()}
        raise ExecutionError(
            f"onnxruntime cannot run the model on calibration data of shapes {shapes}",
            because=str(error).splitlines()[0],
            help="see whether the model runs on it as it is",
        ) from error


def _taps(model: ir.Model, operators: set[str]) -> list[str]:
    """Floating-point inputs and outputs of nodes, in the order of the graph."""
    found: dict[str, None] = {}
    for node in model.graph:
        if node.op_type not in operators:
            continue
        for value in (*node.inputs, *node.outputs):
            if value is None or not value.name or value.is_initializer():
                continue
            if value.type is not None and value.type.dtype in (
                ir.DataType.FLOAT,
                ir.DataType.FLOAT16,
            ):
                found[value.name] = None
    return list(found)


def _by_name(model: ir.Model) -> dict[str, ir.Value]:
    values = {value.name or "": value for value in model.graph.inputs}
    for node in model.graph:
        values.update({value.name or "": value for value in node.outputs})
    return values


def _reduced(model: ir.Model, taps: Sequence[str], counted: bool) -> ir.Model:
    values = _by_name(model)
    for name in taps:
        value = values[name]
        kinds = [*_REDUCED, *(["Size"] if counted else [])]
        ends = ["/low", "/high", "/sum", "/size"]
        for kind, end in zip(kinds, ends, strict=False):
            read = value
            made = []
            if kind == "ReduceSum" and value.dtype == ir.DataType.FLOAT16:
                # A sum of halves overflows where no value does.
                cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
                made, read = [cast], cast.outputs[0]
                read.name, read.type = f"{name}/float", ir.TensorType(ir.DataType.FLOAT)
            attributes = {} if kind == "Size" else {"keepdims": 0}
            node = ir.node(kind, [read], attributes)
            model.graph.extend([*made, node])
            output = node.outputs[0]
            output.name = f"{name}{end}"
            output.type = ir.TensorType(ir.DataType.INT64) if kind == "Size" else read.type
            output.shape = ir.Shape([])
            model.graph.outputs.append(output)
    return model


def _tapped(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """The model with these values as its outputs, and nothing that they do not need."""
    values = _by_name(model)
    model.graph.outputs.clear()
    for name in names:
        value = values[name]
        if value.is_graph_input():
            node = ir.node("Identity", [value])
            model.graph.append(node)
            node.outputs[0].name, node.outputs[0].type = f"{name}/itself", value.type
            value = node.outputs[0]
        model.graph.outputs.append(value)
    common.RemoveUnusedNodesPass()(model)
    return model


def _grouped(taps: Sequence[str], sizes: Mapping[str, int], elements: int) -> list[list[str]]:
    """Activations in groups of at most so many elements, or of one alone."""
    groups: list[list[str]] = []
    free = 0
    for name in taps:
        if not groups or sizes[name] > free:
            groups.append([])
            free = elements
        groups[-1].append(name)
        free -= sizes[name]
    return groups
