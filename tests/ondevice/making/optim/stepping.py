"""Optimizer models in onnxruntime, step by step, beside PyTorch's optimizers in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor

from ortrain.ondevice import contract
from ortrain.ondevice.optim import Optimizer, optimizer_program, states
from ortrain.program import Program

# Each form of an update: rows, whole, and small ones together, with a scalar and an empty one.
SHAPES = {
    "embedding.weight": (2052, 513),
    "encoder.weight": (200, 131),
    "encoder.bias": (131,),
    "norm.weight": (7, 1),
    "scale": (),
    "nothing": (0, 3),
}

# The same at a hundredth of the size, with the fixture ``small_pieces``.
FEW = {
    "embedding.weight": (54, 57),
    "encoder.weight": (20, 13),
    "encoder.bias": (13,),
    "norm.weight": (7, 1),
    "scale": (),
    "nothing": (0, 3),
}


def listed(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, ir.DataType, tuple[int, ...]]]:
    """Parameters as the optimizer model takes them."""
    return [(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items()]


def session(program: Program, *, optimized: str = "") -> ort.InferenceSession:
    """The program in onnxruntime, with all of its optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = optimized
    return ort.InferenceSession(program.serialize(), options, providers=["CPUExecutionProvider"])


def run(
    model: ort.InferenceSession, tensors: dict[str, np.ndarray], aliases: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """One run; what ``aliases`` names is written where its input lies.

    Args:
        model: the session.
        tensors: by input.
        aliases: output → input.

    Returns:
        By output.
    """
    binding = model.io_binding()
    values = {i.name: ort.OrtValue.ortvalue_from_numpy(tensors[i.name]) for i in model.get_inputs()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    names = [output.name for output in model.get_outputs()]
    for name in names:
        if name in aliases:
            binding.bind_ortvalue_output(name, values[aliases[name]])
        else:
            binding.bind_output(name)
    model.run_with_iobinding(binding)
    return dict(zip(names, (v.numpy() for v in binding.get_outputs()), strict=True))


class Training:
    """The same gradients for an optimizer model and for an optimizer of PyTorch, in float64.

    Args:
        optimizer: of the model.
        reference: makes PyTorch's, of parameters by name.
        shapes: of the parameters.
        in_place: whether outputs are written where their inputs lie.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reference: Callable[[dict[str, Tensor]], torch.optim.Optimizer],
        *,
        shapes: Mapping[str, tuple[int, ...]],
        in_place: bool = True,
    ) -> None:
        self.random = np.random.default_rng(3)
        self.shapes = shapes
        self.in_place = in_place
        self.optimizer = optimizer
        self.program = optimizer_program(optimizer, listed(shapes))
        self.model = session(self.program)
        self.tensors: dict[str, np.ndarray] = {
            name: self._draw(shape) for name, shape in shapes.items()
        }
        self.reference = {
            name: torch.from_numpy(self.tensors[name].astype(np.float64)).requires_grad_()
            for name in shapes
        }
        self.torch = reference(self.reference)
        for state in states(optimizer, listed(shapes)):
            self.tensors[state.name] = np.zeros(state.shape, np.float32)
        self.tensors["step"] = np.zeros(1, np.int64)

    def step(self, learning_rate: float) -> dict[str, np.ndarray]:
        """One step of both; the model's outputs."""
        for name, shape in self.shapes.items():
            gradient = self._draw(shape)
            self.tensors[contract.gradient(name)] = gradient
            self.reference[name].grad = torch.from_numpy(gradient.astype(np.float64))
        if self.optimizer.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.reference.values(), self.optimizer.max_norm)
        for group in self.torch.param_groups:
            group["lr"] = learning_rate * group.get("scale", 1.0)
        self.torch.step()
        self.tensors["learning_rate"] = np.array([learning_rate], np.float32)
        aliases = self.program.aliases if self.in_place else {}
        outputs = run(self.model, self.tensors, aliases)
        for output, name in self.program.aliases.items():
            if not self.in_place:
                self.tensors[name] = outputs[output]
        self.tensors["step"] = outputs["step.updated"].copy()
        return outputs

    def error(self) -> float:
        """The largest difference between the parameters, relative above 1.

        Without the elements that the reference calls doubtful, which are few.
        """
        worst = 0.0
        for name, reference in self.reference.items():
            expected = reference.detach().numpy()
            error = np.abs(self.tensors[name] - expected) / np.maximum(1, np.abs(expected))
            doubtful = self.torch.state[reference].get("doubtful")
            if doubtful is not None and doubtful.numel():
                assert doubtful.double().mean() < 1e-3
                error = np.where(doubtful.numpy(), 0, error)
            worst = max(worst, float(error.max(initial=0)))
        return worst

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self.random.standard_normal(shape), np.float32)
