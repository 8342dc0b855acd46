"""A step of training: forward, backward, accumulation, exchange and update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from ortrain.classic.description import Descriptions
from ortrain.classic.exchange import add_up
from ortrain.classic.names import unknown
from ortrain.classic.updates import Update
from ortrain.config import Options
from ortrain.errors import InputError, OrtrainWarning, listing


class Outcome(NamedTuple):
    """What a training step gives.

    Attributes:
        outputs: as they are described, without autograd's graph.
        ends: whether the step was the last one of an accumulation.
        finite: whether all gradients were, and the parameters were updated; True before the end.
    """

    outputs: list[torch.Tensor]
    ends: bool
    finite: bool


class Stepper:
    """Trains a module, and evaluates it.

    The gradients of the steps of an accumulation, in all processes, are added up; the sum is
    divided by the number of steps times that of processes, and by the loss scale.

    Args:
        module: takes the described inputs in order, and returns a tuple of the outputs.
        descriptions: of its inputs and outputs.
        update: changes the parameters.
        device: that it is on.
        accumulation: steps for each update.
        has_label: the last input is the label of a loss function, and not needed to evaluate.
        deterministic: whether PyTorch's operators are to be the reproducible ones.
        mixed: whether steps whose gradients overflow are left out.
    """

    def __init__(
        self,
        module: nn.Module,
        descriptions: Descriptions,
        update: Update,
        *,
        device: torch.device,
        accumulation: int,
        has_label: bool,
        deterministic: bool,
        mixed: bool,
    ) -> None:
        self.module, self.descriptions, self.update = module, descriptions, update
        self.device, self.accumulation = device, accumulation
        self.has_label, self.deterministic, self.mixed = has_label, deterministic, mixed
        self.world = distributed.get_world_size() if _several() else 1
        self.done = 0  # steps of the present accumulation
        self._scale = 1.0
        self._unseen = {*descriptions.names}  # inputs that no call has had yet
        self.sample: tuple[torch.Tensor, ...] | None = None

    def train(self, inputs: Sequence[Any], lr: float, scale: float = 1.0) -> Outcome:
        """Runs a training step, and the update behind the last one of an accumulation.

        Args:
            inputs: tensors, all that are described.
            lr: learning rate of the update.
            scale: that the loss is multiplied by.

        Raises:
            InputError: inputs or outputs are not as they are described, or the scale has changed
                within an accumulation. Nothing has changed then.
        """
        if self.done and scale != self._scale:
            raise InputError(
                f"the loss scale changes from {self._scale:g} to {scale:g} within an accumulation",
                because="gradients of several scales cannot be added up",
                help=f"change it at every {self.accumulation}th step only",
            )
        self.module.train()
        with self._algorithms(), torch.enable_grad():
            outputs = self._outputs(inputs, len(self.descriptions.inputs))
            loss = outputs[self.descriptions.loss]
            if not loss.requires_grad:
                raise InputError(
                    f"the loss {self.descriptions.outputs[self.descriptions.loss].name!r} does not "
                    "depend on any parameter that is trained",
                    help="unfreeze one, or take the no_grad or detach out of the model",
                )
            if not self.done:  # of whatever the script has done with the model itself
                self._forget()
            try:
                torch.autograd.backward(loss, torch.full_like(loss, scale))
            except BaseException:
                self.begin()  # part of a gradient is none
                raise
            self._scale = scale
            self.done += 1
            ends = self.done >= self.accumulation
            finite = self._end(lr, scale) if ends else True
        return Outcome([output.detach() for output in outputs], ends, finite)

    def _end(self, lr: float, scale: float) -> bool:
        parameters = list(self.update.parameters.values())
        if self.world > 1:
            add_up(parameters)
        divisor = scale * self.accumulation * self.world
        finite = self.update(lr, divisor, checked=self.mixed)
        self.begin()
        return finite

    def begin(self) -> None:
        """Begins an accumulation anew, as after other weights have been loaded."""
        self._forget()
        self.done = 0

    def _forget(self) -> None:
        """Drops the gradients that are there."""
        for parameter in self.update.parameters.values():
            parameter.grad = None

    def evaluate(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs in evaluation mode; without the label, those behind the loss.

        Raises:
            InputError: inputs or outputs are not as they are described.
        """
        self.module.eval()
        with self._algorithms(), torch.no_grad():
            return self._outputs(inputs, len(self.descriptions.inputs) - self.has_label)

    def _outputs(self, inputs: Sequence[Any], least: int) -> list[torch.Tensor]:
        """Those of a call that is as it is described."""
        names = self.descriptions.names
        for name, value in zip(names, inputs, strict=False):
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"the input {name!r} is a {type(value).__name__}, and no tensor",
                    help="a list of batches is not a batch: pass each input as a tensor",
                )
        assert least <= len(inputs) <= len(names)
        self._correct(inputs)
        sizes = self.descriptions.check_inputs(inputs)
        given = tuple(value.to(self.device) for value in inputs)
        result = list(self.module(*given))
        expected = self.descriptions
        if len(inputs) < len(names):  # of a loss function without its label
            outputs = expected.outputs[1:]
            if len(result) == len(outputs):
                for entry, tensor in zip(outputs, result, strict=True):
                    entry.check(tensor, sizes, "output")
                return result
        elif len(result) == len(expected.outputs):
            expected.check_outputs(result, sizes)
            self.sample = given
            return result
        named = listing([*expected.results], 20)
        raise InputError(
            f"the model returns {len(result)} tensors, and {len(expected.outputs)} outputs are "
            f"described: {named}",
            help="describe the outputs in the order in which the model returns them; of a loss "
            "function, the loss comes first",
        )

    def _correct(self, inputs: Sequence[torch.Tensor]) -> None:
        """Leaves out of the descriptions what is wrong in them, where nothing depends on it."""
        if self._unseen:
            self.descriptions, told = self.descriptions.as_they_come(
                inputs, self._unseen, has_label=self.has_label
            )
            self._unseen -= {*self.descriptions.names[: len(inputs)]}
            for line in told:
                warnings.warn(line, OrtrainWarning, stacklevel=5)

    @contextmanager
    def _algorithms(self) -> Iterator[None]:
        """PyTorch's reproducible operators inside, where they are asked for."""
        if not self.deterministic:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def device_of(name: str | torch.device) -> torch.device:
    """The device of a name.

    Raises:
        InputError: there is none of that name, or it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device {name!r} is none", because=str(error).splitlines()[0]) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device {str(name)!r}, and PyTorch finds no CUDA device",
            help="train on the processor: 'cpu'; ORTTrainerOptions({'device': {'id': 'cpu'}})",
        )
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {str(name)!r}: expected 'cpu', 'cuda' or 'cuda:0'")
    return device


def trained(
    parameters: Mapping[str, nn.Parameter], frozen: Sequence[str], known: Sequence[str]
) -> dict[str, nn.Parameter]:
    """The parameters that are trained.

    Args:
        parameters: all, by name.
        frozen: names of those that are not.
        known: names that may be frozen.

    Raises:
        InputError: a name that is not known, or nothing is left.
    """
    for name in frozen:
        if name not in known:
            raise unknown("the frozen weight", name, known)
    left = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in frozen and parameter.requires_grad
    }
    if not left:
        raise InputError("no parameter of the model is trained", help="freeze fewer of them")
    return left


def pipeline(
    options: Options | None,
    device: torch.device,
    *,
    mixed: bool,
    deterministic: bool,
    opset: int | None,
) -> Options:
    """The settings of the pipeline.

    Args:
        options: those that a script gives; None for the defaults.
        device: that is trained on.
        mixed: in mixed precision: float16 on a GPU, bfloat16 on a CPU, unless they say otherwise.
        deterministic: whether two runs have to be equal: then no clock chooses the engine.
        opset: of the graphs; None leaves it as it is.
    """
    options = options or Options()
    if mixed and options.precision is None:
        options = replace(options, precision="fp16" if device.type == "cuda" else "bf16")
    if deterministic and options.engine == "auto":
        options = replace(options, engine="aten")
    if opset is not None and opset >= 18:
        options = replace(options, opset=opset)
    return options


Attributes = Callable[[str], Mapping[str, Any]]

__all__ = ["Attributes", "Outcome", "Stepper", "device_of", "pipeline", "trained"]
