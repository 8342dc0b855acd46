"""What a script says of a model's inputs and outputs, and whether a call is as it says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ortrain.errors import InputError, listing
from ortrain.kinds import expect, shown


@dataclass(frozen=True)
class Described:
    """A tensor as a script describes it.

    Attributes:
        name: of the input or output.
        shape: a whole number for a fixed size, a name for one that varies; none for a scalar.
        dtype: None where the script does not say it.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype | None = None

    def check(self, tensor: torch.Tensor, sizes: dict[str, int], what: str) -> None:
        """Compares a tensor with the description.

        Args:
            tensor: of a call.
            sizes: of the names, in this call; those that are new are added.
            what: "input" or "output".

        Raises:
            InputError: another number of dimensions or size.
        """
        shape = tuple(tensor.shape)
        fits = len(shape) == len(self.shape)
        # A scalar loss of one element is what some models return.
        fits |= what == "output" and not self.shape and tensor.numel() == 1
        if fits:
            for described, size in zip(self.shape, shape, strict=False):
                known = described if isinstance(described, int) else sizes.get(described, size)
                fits &= known == size
        if not fits:
            named = {name: sizes[name] for name in self.shape if name in sizes}
            raise InputError(
                f"the {what} {self.name!r} has the shape {list(shape)}, and is described as "
                f"{list(self.shape)}",
                because=f"in this call {named}" if named else "",
                help="describe a size that varies by a name, and every dimension of the tensor",
            )
        for described, size in zip(self.shape, shape, strict=False):
            if isinstance(described, str):
                sizes.setdefault(described, size)


@dataclass(frozen=True)
class Descriptions:
    """Those of a model.

    Attributes:
        inputs: in the order in which a step is given them; the label of a loss function is last.
        outputs: in the order in which the model, with its loss, returns them.
        loss: position of the loss among the outputs.
    """

    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]
    loss: int

    def __post_init__(self) -> None:
        for what, entries in (("input", self.inputs), ("output", self.outputs)):
            names = [entry.name for entry in entries]
            if twice := [name for name in names if names.count(name) > 1]:
                raise InputError(f"the {what} {twice[0]!r} is described twice")
            if not names:
                raise InputError(f"no {what} is described", help=f"describe each {what} by name")
        loss = self.outputs[self.loss]
        if any(size != 1 for size in loss.shape):
            raise InputError(
                f"the loss {loss.name!r} is described with the shape {list(loss.shape)}",
                because="a loss is one number",
                help="write [] for its shape; a loss for each sample has to be averaged",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs."""
        return tuple(entry.name for entry in self.inputs)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(entry.name for entry in self.outputs)

    def as_they_come(
        self, tensors: Sequence[torch.Tensor], new: Collection[str], *, has_label: bool
    ) -> tuple[Descriptions, list[str]]:
        """These descriptions without what a call shows to be wrong, where nothing depends on it.

        That is so of dtypes, and of how many dimensions a label has, which is that of a loss
        function or any input of whole numbers: the examples of 2020 themselves describe both
        otherwise than they pass them.

        Args:
            tensors: inputs of the call.
            new: names of those that no call has had before.
            has_label: whether the last input is the label of a loss function.

        Returns:
            The descriptions, and a line on each that was wrong.
        """
        inputs, told = [*self.inputs], []
        for i, (entry, tensor) in enumerate(zip(self.inputs, tensors, strict=False)):
            if entry.name not in new:
                continue
            if entry.dtype is not None and tensor.dtype != entry.dtype:
                told.append(
                    f"the input {entry.name!r} is {tensor.dtype}, and described as {entry.dtype}: "
                    "it is taken as it comes"
                )
                entry = replace(entry, dtype=None)
            is_label = has_label and i + 1 == len(self.inputs)
            counts = is_label or not (tensor.is_floating_point() or tensor.is_complex())
            if counts and tensor.ndim != len(entry.shape):
                kind = "label" if is_label else "input"
                told.append(
                    f"the {kind} {entry.name!r} has the shape {list(tensor.shape)}, and is "
                    f"described as {list(entry.shape)}: it is taken as it comes"
                )
                entry = replace(entry, shape=tuple(f"{entry.name}_{d}" for d in range(tensor.ndim)))
            inputs[i] = entry
        return (replace(self, inputs=tuple(inputs)) if told else self), told

    def check_inputs(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Compares the inputs of a call; the sizes of the names in it.

        Raises:
            InputError: an input is not as it is described.
        """
        sizes: dict[str, int] = {}
        for entry, tensor in zip(self.inputs, tensors, strict=False):
            entry.check(tensor, sizes, "input")
        return sizes

    def check_outputs(self, tensors: Sequence[torch.Tensor], sizes: dict[str, int]) -> None:
        """Compares the outputs of a call.

        Raises:
            InputError: an output is not as it is described.
        """
        for entry, tensor in zip(self.outputs, tensors, strict=True):
            entry.check(tensor, sizes, "output")

    def select(self, fetches: Sequence[str]) -> list[int]:
        """Positions of the outputs of these names.

        Raises:
            InputError: an unknown name.
        """
        if missing := [name for name in fetches if name not in self.results]:
            raise InputError(
                f"fetches names {listing([repr(name) for name in missing])}, which is no output",
                help=f"the outputs are {listing([*self.results], 20)}",
            )
        return [self.results.index(name) for name in fetches]


def described(name: object, shape: object, dtype: object = None) -> Described:
    """A description of its parts.

    Raises:
        InputError: an empty name, or a size that is neither a name nor a number above 0.
        TypeError: a part of another type.
    """
    expect("name", name, str, "a string, the name of an input or output")
    if not name:
        raise InputError("an input or output is described without a name")
    expect("shape", shape, (list, tuple), "a list of sizes")
    expect("dtype", dtype, (torch.dtype, type(None)), "a torch.dtype")
    assert isinstance(name, str)
    assert isinstance(shape, list | tuple)
    assert dtype is None or isinstance(dtype, torch.dtype)
    for size in shape:
        named = isinstance(size, str) and size
        if not named and not (isinstance(size, int) and type(size) is not bool and size >= 0):
            raise InputError(
                f"{name!r} is described with the size {shown(size)}",
                help="a size is a whole number, or a name where it varies",
            )
    return Described(name, tuple(shape), dtype)


def of_tuples(description: object) -> Descriptions:
    """Of ``{"inputs": [(name, shape), …], "outputs": [(name, shape, is_loss), …]}``.

    Raises:
        InputError: other keys, entries of another form, or not exactly one loss.
        TypeError: a part of another type.
    """
    expect("model_desc", description, Mapping, "a dict with 'inputs' and 'outputs'")
    assert isinstance(description, Mapping)
    if {*description} != {"inputs", "outputs"}:
        raise InputError(
            f"model_desc has the keys {listing([shown(key) for key in description])}",
            help="it has exactly 'inputs' and 'outputs'",
        )
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for key, most in (("inputs", 2), ("outputs", 3)):
        expect(f"model_desc[{key!r}]", description[key], (list, tuple), "a list of tuples")
        rows[key] = [_row(key, row, most) for row in description[key]]
    losses = [i for i, row in enumerate(rows["outputs"]) if row[2:] == (True,)]
    if len(losses) != 1:
        named = [repr(rows["outputs"][i][0]) for i in losses]
        raise InputError(
            f"model_desc has {len(losses)} losses" + (f": {listing(named)}" if named else ""),
            help="mark one output as the loss: ('loss', [], True)",
        )
    return Descriptions(
        tuple(described(*row) for row in rows["inputs"]),
        tuple(described(*row[:2]) for row in rows["outputs"]),
        losses[0],
    )


def _row(key: str, row: object, most: int) -> tuple[Any, ...]:
    if not isinstance(row, list | tuple) or not 2 <= len(row) <= most:
        form = "(name, shape)" if most == 2 else "(name, shape) or (name, shape, is_loss)"
        raise InputError(f"model_desc[{key!r}] has {shown(row)}: expected {form}")
    if len(row) == 3:
        expect("is_loss", row[2], bool, "True or False")
    return tuple(row)


def bound(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], least: int | None = None
) -> list[Any]:
    """Arguments in the order of the names: those by position first, the others by name.

    Args:
        names: of what a step takes.
        args: by position; one list holds them all.
        kwargs: by name.
        least: how many are needed; None for all.

    Raises:
        InputError: too many, one that is missing, given twice, or of no such name.
    """
    if len(args) == 1 and isinstance(args[0], list):
        args = args[0]
    takes = f"a step takes {listing([*names], 20)}"
    if len(args) > len(names):
        raise InputError(f"a step was given {len(args)} arguments", because=takes)
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise InputError(f"a step was given {name!r}, which is not described", because=takes)
        if name in values:
            raise InputError(f"a step was given {name!r} by position and by name", because=takes)
        values[name] = value
    needed = names if least is None else names[:least]
    if missing := [name for name in needed if name not in values]:
        raise InputError(f"a step was not given {listing(missing)}", because=takes)
    given = [name for name in names if name in values]
    if tuple(given) != tuple(names[: len(given)]):
        raise InputError(f"a step was not given {listing([*names[: len(given)]])}", because=takes)
    return [values[name] for name in given]


__all__ = ["Described", "Descriptions", "bound", "described", "of_tuples"]
