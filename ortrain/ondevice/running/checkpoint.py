"""``CheckpointState``: what training changes, and what a checkpoint keeps of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import numpy as np

from ortrain.errors import StateError, listing
from ortrain.ondevice import contract
from ortrain.ondevice.running import checkpoint_file
from ortrain.ondevice.running.checkpoint_file import Content, Property, Spec, Uri
from ortrain.ondevice.running.pickling import NotPickled
from ortrain.ondevice.running.tensor import CPU, Device, Tensor

# Names that an error tells.
MOST_NAMED = 3
# Bits of an int among the properties: parsers of JSON read so many digits, and not ten times more.
_LARGEST_INT = 1 << 10
_LOAD = "module.copy_buffer_to_parameters(buffer, trainable_only=False)"


class Buffer(NotPickled):
    """What a forward in training mode changes, such as running statistics."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def name(self) -> str:
        """Its name in the checkpoint and in the models."""
        return self._tensor.spec.name

    @property
    def data(self) -> np.ndarray:
        """The memory that training reads and writes; on another device than the CPU, a copy.

        It changes with the next step: ``data.copy()`` keeps what it is now. Setting it copies into
        the memory.

        Raises:
            StateError: it has no value, since the checkpoint is nominal.
            TypeError: what is set is no array, or of another dtype.
            ValueError: what is set is of another shape.
        """
        if not self._tensor.has_value:
            raise StateError(
                f"{self.name} has no value",
                because="the checkpoint is nominal",
                help=f"set it, or load all with {_LOAD}",
            )
        return self._tensor.numpy()

    @data.setter
    def data(self, array: np.ndarray) -> None:
        self._tensor.assign(array)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._described()})"

    def _described(self) -> str:
        return str(self._tensor.spec) + ("" if self._tensor.has_value else ", no value")


class Parameter(Buffer):
    """A parameter of a model, trained or frozen."""

    def __init__(self, tensor: Tensor, state: CheckpointState) -> None:
        super().__init__(tensor)
        self._state = state

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._tensor.spec.requires_grad

    @property
    def grad(self) -> np.ndarray | None:
        """The gradient accumulated since the last ``lazy_reset_grad``; zeros before the first step.

        It is the memory that the optimizer reads; on another device than the CPU, a copy. None
        where the parameter is frozen, and as long as no module trains it.
        """
        gradient = self._state.gradients.get(self.name)
        if gradient is None:
            return None
        if not self._state.has_gradients:  # the memory holds what was there before
            return np.zeros(gradient.spec.shape, gradient.spec.dtype)
        return gradient.numpy()

    def _described(self) -> str:
        return f"{super()._described()}, requires_grad={self.requires_grad}"


Item = TypeVar("Item", bound=Buffer)


class Items(NotPickled, Generic[Item]):
    """Parameters or buffers by name, in the models' order; iteration yields ``(name, item)``."""

    def __init__(self, kind: str, items: Iterable[Item]) -> None:
        self._kind = kind
        self._items = {item.name: item for item in items}

    def __getitem__(self, name: str) -> Item:
        if name not in self._items:
            raise KeyError(f"no {self._kind} {name!r}; there are {listing(list(self._items))}")
        return self._items[name]

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self[name].data = array

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[tuple[str, Item]]:
        return iter(self._items.items())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {item!r}" for item in self._items.values())
        return f"<{self._kind}s: {len(self)}{rows}>"


class Properties:
    """What the user keeps in the checkpoint, by name; iteration yields ``(name, value)``."""

    def __init__(self, values: dict[str, Property]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Property:
        if name not in self._values:
            there = f"there are {listing(list(self._values))}" if self._values else "there are none"
            raise KeyError(f"no property {name!r}; {there}")
        return self._values[name]

    def __setitem__(self, name: str, value: Property) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a property is a string, not {name!r}")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError(
                f"the property {name!r} takes an int, a float or a str, and was given a "
                f"{type(value).__name__}; convert it, for example with float(value)"
            )
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"the property {name!r} cannot be nan, which JSON does not have")
        if isinstance(value, int) and value.bit_length() > _LARGEST_INT:
            raise ValueError(
                f"the property {name!r} has {value.bit_length()} bits, and may have {_LARGEST_INT}"
            )
        plain = next(kind for kind in (int, float, str) if isinstance(value, kind))
        self._values[name] = plain(value)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        return iter(self._values.items())

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Properties({self._values!r})"


class CheckpointState(NotPickled):
    """Parameters, buffers, the optimizer's state and the user's properties.

    Made by `load_checkpoint`. Modules and optimizers train it in place.

    Attributes:
        parameters: by name; `Parameter`.
        buffers: by name; running statistics and the like.
        properties: the user's own ints, floats and strings, saved with the checkpoint.
        description: what the checkpoint says of its tensors.
        gradients: the memory of those of the trained parameters, once there is a module.
        optimizer_states: their memory, as far as the checkpoint or an optimizer has made it.
        inputs: what models are told beside tensors, on the CPU: ``step``, ``seed``,
            ``learning_rate``, ``lazy_reset_grad``.
        device: where the tensors lie.
    """

    def __init__(self, content: Content) -> None:
        self.description = content
        tensors, content.tensors = content.tensors, {}
        self.tensors = {
            spec.name: Tensor(spec, tensors.get(spec.name))
            for spec in (*content.parameters, *content.buffers)
        }
        """The memory of parameters and buffers."""
        self.optimizer_states = {
            spec.name: Tensor(spec, tensors[spec.name])
            for spec in content.states
            if spec.name in tensors
        }
        self.gradients: dict[str, Tensor] = {}
        self.parameters: Items[Parameter] = Items(
            "parameter", [Parameter(self.tensors[s.name], self) for s in content.parameters]
        )
        self.buffers: Items[Buffer] = Items(
            "buffer", [Buffer(self.tensors[s.name]) for s in content.buffers]
        )
        self.properties = Properties(content.properties)
        self.inputs = {
            name: Tensor(Spec(name, np.dtype(dtype), (1,)))
            for name, dtype in (
                (contract.STEP, np.int64),
                (contract.SEED, np.int64),
                (contract.LEARNING_RATE, np.float32),
                (contract.LAZY_RESET_GRAD, np.bool_),
            )
        }
        self._step, self._seed, self._rate, self._reset = (t.numpy() for t in self.inputs.values())
        self._step[0] = content.step or 0
        self._seed[0] = content.seed or 0
        self._reset[0] = True
        self._learning_rate: float | None = None
        if content.learning_rate is not None:
            self.learning_rate = content.learning_rate
        self.device = CPU
        self._placed = False
        self._complete = False

    # -- files -----------------------------------------------------------------------------------

    @staticmethod
    def load_checkpoint(checkpoint_uri: Uri) -> CheckpointState:
        """Loads a checkpoint.

        Args:
            checkpoint_uri: a path, or the file's content.

        Raises:
            InputError: it is missing, cut off, no checkpoint, or of a newer version.
        """
        return CheckpointState(checkpoint_file.read(checkpoint_uri))

    @staticmethod
    def save_checkpoint(
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
    ) -> None:
        """Saves a checkpoint, as a whole or not at all.

        Args:
            state: what to save.
            checkpoint_uri: the file, replaced once the new one is on the disk.
            include_optimizer_state: also save what continues training bit for bit: the optimizer's
                states, the number of updates, the learning rate, the seed.

        Raises:
            SaveError: the file could not be written.
            StateError: parts of a nominal checkpoint have values, and others have none.
        """
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state must be a CheckpointState, not a {type(state).__name__}")
        description = state.description
        tensors = {name: t.numpy() for name, t in state.tensors.items() if t.has_value}
        if any(spec.name in tensors for spec in description.parameters):
            state.require_values("save")
        content = Content(
            description.parameters,
            description.buffers,
            description.states,
            description.texts,
            tensors,
            dict(state.properties),
        )
        if include_optimizer_state:
            content.tensors |= {name: t.numpy() for name, t in state.optimizer_states.items()}
            content.step, content.seed = state.step, state.seed
            content.learning_rate = state.learning_rate
        checkpoint_file.write(content, checkpoint_uri)

    # -- what training counts --------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self._step[0])

    @property
    def seed(self) -> int:
        """That of the next run in training mode; each run counts it up."""
        return int(self._seed[0])

    @seed.setter
    def seed(self, value: int) -> None:
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError("a seed is a whole number of 64 bits")
        self._seed[0] = value

    @property
    def learning_rate(self) -> float | None:
        """Of the next update; None where neither the checkpoint nor an optimizer has said."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        rate = float(value)
        if not math.isfinite(rate):
            raise ValueError(f"a learning rate is a finite number, not {value!r}")
        self._learning_rate = self._rate[0] = rate

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have been accumulated since they were last reset."""
        return not self._reset[0]

    @has_gradients.setter
    def has_gradients(self, value: bool) -> None:
        self._reset[0] = not value

    # -- for modules and optimizers --------------------------------------------------------------

    def place(self, device: Device) -> None:
        """Moves the tensors to where they are trained.

        Raises:
            StateError: they are trained elsewhere already.
        """
        if device != self.device:
            if self._placed:
                raise StateError(
                    f"this state is trained on {self.device}, and cannot be on {device} too",
                    help="give all modules one device, or load the checkpoint again for another",
                )
            self.device = device
            for tensor in (*self.tensors.values(), *self.optimizer_states.values()):
                tensor.to(device)
        self._placed = True

    def trained(self) -> list[Spec]:
        """The parameters that are trained, in the models' order."""
        return [spec for spec in self.description.parameters if spec.requires_grad]

    def require_values(self, action: str) -> None:
        """Raises where a nominal checkpoint has not been completed.

        Raises:
            StateError: some parameters or buffers have no values.
        """
        if self._complete:
            return
        missing = [name for name, tensor in self.tensors.items() if not tensor.has_value]
        if missing:
            raise StateError(
                f"Cannot perform {action} with a nominal state. Please load the model parameters "
                "first.",
                because=f"the checkpoint has no values for {listing(missing, MOST_NAMED)}",
                help=f"call {_LOAD} for all parameters, and state.parameters[name] = array or "
                "state.buffers[name] = array for single ones",
            )
        self._complete = True

    def __repr__(self) -> str:
        return f"<CheckpointState: {self.parameters!r}, {self.buffers!r}, {self.properties!r}>"
