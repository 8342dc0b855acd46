"""Statistics of activations and of their gradients, in a file for each and step."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ortrain.errors import CaptureError
from ortrain.hooks.subscribers import GlobalSubscriberManager, RuntimeStates, SubscriberBase
from ortrain.kinds import expect, expect_path, expect_whole

ORDER = "order.txt"
_SHOWN = 128
_STEP = re.compile(r"step_\d+")


@dataclass(frozen=True)
class Statistics:
    """Of one tensor. Minimum, maximum, mean and deviation are NaN where an element is.

    Attributes:
        least: the smallest element; NaN of none.
        most: the largest one.
        mean: in float64.
        deviation: with n - 1, in float64; NaN of one element.
        nan: how many are no number.
        inf: how many are infinite.
        negative: how many are below zero.
        positive: how many are above.
        zero: how many are zero.
    """

    least: float
    most: float
    mean: float
    deviation: float
    nan: int
    inf: int
    negative: int
    positive: int
    zero: int


def statistics_of(tensor: torch.Tensor, bucket_size: int = 1 << 29) -> Statistics:
    """The statistics of a tensor of any dtype, of so many elements at a time."""
    flat = tensor.detach().reshape(-1)
    counts = torch.zeros(5, dtype=torch.int64)
    least, most, mean, squares, seen = float("inf"), float("-inf"), 0.0, 0.0, 0
    for start in range(0, flat.numel(), bucket_size):
        values = flat[start : start + bucket_size].to(torch.float64)
        signs = [values.isnan(), values.isinf(), values < 0, values > 0, values == 0]
        counts += torch.stack([each.sum() for each in signs]).cpu()
        count, middle = values.numel(), values.mean().item()
        # Sums of squares about two means, put together as Chan, Golub and LeVeque do (1979).
        apart = middle - mean
        squares += (values - middle).square().sum().item()
        squares += apart * apart * seen * count / (seen + count)
        mean += apart * count / (seen + count)
        seen += count
        low, high = values.aminmax()
        least, most = _either(least, low.item(), min), _either(most, high.item(), max)
    nothing = float("nan")
    if not seen:
        least = most = mean = nothing
    deviation = (squares / (seen - 1)) ** 0.5 if seen > 1 else nothing
    nan, inf, negative, positive, zero = counts.tolist()
    return Statistics(least, most, mean, deviation, nan, inf, negative, positive, zero)


def _either(a: float, b: float, choose: Callable[[float, float], float]) -> float:
    return float("nan") if a != a or b != b else choose(a, b)


class StatisticsSubscriber(SubscriberBase):
    """Writes statistics of each module's outputs, and of their gradients.

    In ``output_dir/step_<n>`` there is a file ``<Class>_<module>_<output>th_output_forward`` for
    each, one with ``_backward`` for its gradient, and their names in the order in which they were
    written in ``order.txt``.

    Args:
        output_dir: the folder, which is made.
        start_step: the first step to write.
        end_step: the step behind the last one.
        override_output_dir: whether steps that are in the folder already make way.
        run_on_cpu: copy tensors to the CPU first, where memory on the device is short.
        bucket_size: how many elements are looked at in one go.

    Raises:
        TypeError: an argument of another type.
        FileExistsError: the folder is there, and may not be written over.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 1024 * 1024 * 1024 // 2,
    ) -> None:
        super().__init__(start_step, end_step)
        expect_path("output_dir", output_dir)
        expect("override_output_dir", override_output_dir, bool, "True or False")
        expect_whole("bucket_size", bucket_size)
        if bucket_size < 1:
            raise ValueError(f"bucket_size={bucket_size}: expected 1 or more")
        self._folder = Path(output_dir)
        self._run_on_cpu, self._bucket_size = run_on_cpu, bucket_size
        if self._folder.exists():
            if not override_output_dir:
                raise FileExistsError(
                    f"the folder {str(self._folder)!r} is there already; choose another one, or "
                    "override_output_dir=True"
                )
            # What it has itself written before, and nothing else that may be there.
            for step in self._folder.iterdir():
                if _STEP.fullmatch(step.name):
                    shutil.rmtree(step)

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Writes the statistics of an output."""
        states = run_rtx.global_states
        index = states.module_to_module_index[module]
        name = f"{type(module).__name__}_{index}_{tensor_index}th_output"
        return self.record(name, tensor, states.execution_step, states.module_index_to_depth[index])

    def record(self, name: str, tensor: torch.Tensor, step: int, depth: int = 0) -> torch.Tensor:
        """Writes the statistics of a tensor, and of its gradient when it comes."""
        self._write(name, "forward", tensor, step, depth)
        if tensor.requires_grad:
            # A view, whose gradient is that of this reader alone, and no tensor of the model's.
            tensor = tensor.view_as(tensor)
            tensor.register_hook(lambda grad: self._write(name, "backward", grad, step, depth))
        return tensor

    def _write(self, name: str, way: str, tensor: torch.Tensor, step: int, depth: int) -> None:
        folder = self._folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if self._run_on_cpu:
            tensor = tensor.cpu()
        found = statistics_of(tensor, self._bucket_size)
        samples = tensor.reshape(-1)[:_SHOWN].tolist()
        text = (
            f"{'>' * depth}{name} {way} run shape: {tuple(tensor.shape)} dtype: {tensor.dtype} "
            f"size: {tensor.numel()}\n"
            f"min: {found.least:.6g} max: {found.most:.6g}, mean: {found.mean:.6g}, "
            f"std: {found.deviation:.6g}\n"
            f"nan: {found.nan}, inf: {found.inf}\n"
            f"samples(top {_SHOWN}): {', '.join(f'{sample:.6g}' for sample in samples)}\n"
            f"neg: {found.negative}, pos: {found.positive}, zero: {found.zero}\n"
            f"{'=' * 16}\n"
        )
        (folder / f"{name}_{way}").write_text(text, encoding="utf-8")
        with (folder / ORDER).open("a", encoding="utf-8") as order:
            order.write(f"{name}_{way}\n")


def inspect_activation(activation_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; the subscribed `StatisticsSubscriber` writes its statistics by this name.

    Args:
        activation_name: name of its files.
        tensor: a value in a model's forward.

    Raises:
        CaptureError: in a capture, while a subscriber is there: a graph writes no files.
    """
    expect("activation_name", activation_name, str, "a string")
    for subscriber in GlobalSubscriberManager.active():
        if not isinstance(subscriber, StatisticsSubscriber):
            continue
        if torch.compiler.is_exporting() or torch.compiler.is_compiling():
            raise CaptureError(
                f"inspect_activation({activation_name!r}, …) writes files, which no graph does",
                help="it runs in PyTorch while a StatisticsSubscriber is subscribed",
            )
        step = GlobalSubscriberManager.get_run_context().global_states.execution_step
        if not (torch.is_inference_mode_enabled() and tensor.is_inference()):
            tensor = subscriber.record(activation_name, tensor, step)
        else:
            subscriber.record(activation_name, tensor, step)
    return tensor
