"""``GoldenSet``: the examples that a model is compared on before and after a rewrite."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ortrain.deploy.equivalence.tasks import TASKS
from ortrain.errors import InputError, listing
from ortrain.kinds import NONE, expect

Array = np.ndarray


@dataclass(frozen=True)
class GoldenSet:
    """Examples in batches, with their labels and names of parts of them.

    Attributes:
        batches: inputs by their names, each an array with the batch as its first axis; batches may
            differ in every size.
        labels: of all examples in their order. ``[examples]`` of classes or of numbers,
            ``[examples, labels]`` of zeros and ones, ``[examples, 2]`` of the first and the last
            position of an answer, or ``[examples, longest]`` of classes of tokens, -100 for those
            that have none. None: predictions are compared with each other alone.
        slices: name → indices of examples; a metric is given for each.
        id2label: class → its name; without one that of the model's configuration, or its number.
        task: what the labels and the predictions are, one of ``TASKS``; by default it follows from
            the labels and the outputs.
        metric: that decides, one of the task's; by default its first.

    Raises:
        TypeError: a value is of another type.
        ValueError: ``task`` or ``metric`` is none that there is.
        InputError: there are no examples, or labels and slices are not of these examples.
    """

    batches: Sequence[Mapping[str, Array]]
    labels: Array | None = None
    slices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    id2label: Mapping[int, str] = field(default_factory=dict)
    task: str | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        expect("batches", self.batches, Sequence, "a list of dicts of arrays")
        expect("slices", self.slices, Mapping, "a dict of names and indices")
        expect("id2label", self.id2label, Mapping, "a dict of classes and their names")
        _expect_task(self.task, self.metric)
        batches = tuple(_batch(number, each) for number, each in enumerate(self.batches))
        object.__setattr__(self, "batches", batches)
        if not self.examples:
            raise InputError(
                "the golden set is empty",
                because="nothing was compared would look like nothing has changed",
                help="give examples that the model is going to meet, some hundreds of them",
            )
        if self.labels is not None:
            self._expect_labels()
        for name, members in self.slices.items():
            self._expect_slice(name, members)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        model: str | os.PathLike[str],
        *,
        text_column: str | tuple[str, str] = "text",
        label_column: str = "label",
        slice_columns: Sequence[str] = (),
        batch_size: int = 8,
        max_length: int | None = None,
        limit: int | None = None,
        task: str | None = None,
        metric: str | None = None,
    ) -> GoldenSet:
        """Examples of a file.

        Args:
            path: a ``.csv`` (quoted), ``.tsv`` (not quoted) or ``.jsonl`` file of text in UTF-8, or
                an ``.npz`` file of arrays that are named as the inputs, with ``labels`` and
                ``slice:NAME`` (indices, or one bool for each example) among them.
            model: folder of the model, whose tokenizer the texts are given to and whose classes the
                labels are of.
            text_column: column, or key, of the text; two of them for pairs of texts. In ``.jsonl``
                files a text may be a list of words, and the label one of labels of these words.
            label_column: of the label: a name of a class, its number, a number for regression,
                or the text that an encoder-decoder model is to write. A file without the usual
                one has no labels; those of a causal language model are then its texts.
            slice_columns: each value of these is a slice: ``language=de``.
            batch_size: examples in a batch; they are padded to the longest of it.
            max_length: tokens of the longest text, longer ones are cut; by default as many as the
                tokenizer says.
            limit: examples to read; by default all.
            task: as for the class.
            metric: as for the class.

        Raises:
            TypeError: an argument is of another type.
            InputError: there is no such file, or a row of it is broken.
            MissingPackage: texts need the extra ``hf``.
        """
        from ortrain.deploy.equivalence import golden_file

        _expect_task(task, metric)
        return cls(
            **golden_file.read(
                path,
                model,
                text_column=text_column,
                label_column=label_column,
                slice_columns=slice_columns,
                batch_size=batch_size,
                max_length=max_length,
                limit=limit,
            ),
            task=task,
            metric=metric,
        )

    @classmethod
    def draw(
        cls,
        data: Iterable[Any],
        *,
        labels: str | Sequence[Any] | Array | None = None,
        limit: int = 256,
        batch_size: int = 8,
        seed: int | None = None,
        batched: bool | None = None,
        input_names: Sequence[str] | None = None,
        slices: Mapping[str, Sequence[int]] | None = None,
        slice_columns: Sequence[str] = (),
        id2label: Mapping[int, str] | None = None,
        task: str | None = None,
        metric: str | None = None,
    ) -> GoldenSet:
        """Examples of a datasets object, a DataLoader, or anything else that can be gone through.

        Args:
            data: dicts of one example each or of a batch each, of arrays, tensors or lists; or
                tuples whose last element are labels, where ``input_names`` names all others.
            labels: the key of the labels in ``data`` (``labels`` and ``label`` are found by
                themselves, and so are ``start_positions`` with ``end_positions``), or the labels of
                all examples in the order of ``data``.
            limit: examples at most.
            batch_size: examples in a batch, where ``data`` has single ones. Neighbours of one size
                come into one batch; nothing is padded.
            seed: draws from all of ``data``, which then needs a length and an index; without one
                the first examples are taken.
            batched: whether an element of ``data`` is a batch; by default that is found out.
            input_names: of the elements of tuples.
            slices: name → indices of the examples in the order of ``data``.
            slice_columns: keys of ``data`` of which each value is a slice: ``language=de``.
            id2label: as for the class.
            task: as for the class.
            metric: as for the class.

        Raises:
            TypeError: an argument, or an element of ``data``, is of another type.
            ValueError: it cannot be told whether elements are batches.
            InputError: ``data`` is empty, or its examples do not belong together.
        """
        from ortrain.deploy.equivalence import drawing

        _expect_task(task, metric)
        expect("slices", slices, (Mapping, NONE), "a dict of names and indices")
        expect("id2label", id2label, (Mapping, NONE), "a dict of classes and their names")
        drawn = drawing.draw(
            data,
            labels=labels,
            limit=limit,
            batch_size=batch_size,
            seed=seed,
            batched=batched,
            input_names=input_names,
            slices=slices or {},
            slice_columns=slice_columns,
        )
        return cls(**drawn, id2label=id2label or {}, task=task, metric=metric)

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return sum(map(self.size_of, self.batches))

    @staticmethod
    def size_of(batch: Mapping[str, Array]) -> int:
        """How many examples a batch has."""
        return next((len(array) for array in batch.values() if array.ndim), 0)

    def _expect_labels(self) -> None:
        labels = np.asarray(self.labels)
        object.__setattr__(self, "labels", labels)
        if labels.dtype.kind not in "iubf" or not labels.ndim:
            raise InputError(
                f"labels are numbers, and these are of the type {labels.dtype}",
                help="give classes by number; labels of tokens as one array, -100 behind the end",
            )
        if len(labels) != self.examples:
            raise InputError(
                f"there are {len(labels)} labels of {self.examples} examples",
                help="give one for each example, in the order of the batches",
            )

    def _expect_slice(self, name: str, members: Sequence[int]) -> None:
        expect("slices", name, str, "a dict of names and indices")
        indices = np.asarray(members)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise InputError(
                f"the slice {name!r} is no list of indices", help="give numbers of examples, from 0"
            )
        if not indices.size:
            raise InputError(f"the slice {name!r} is empty", help="leave it out")
        if indices.min() < 0 or indices.max() >= self.examples:
            beyond = indices[(indices < 0) | (indices >= self.examples)]
            raise InputError(
                f"the slice {name!r} has the example {int(beyond[0])}",
                because=f"there are {self.examples}, from 0 to {self.examples - 1}",
                help="correct the indices",
            )


def _expect_task(task: str | None, metric: str | None) -> None:
    expect("task", task, (str, NONE), "the name of a task")
    expect("metric", metric, (str, NONE), "the name of a metric")
    if task is not None and task not in TASKS:
        raise ValueError(f"task={task!r}: expected {', '.join(TASKS)} or None")
    known = TASKS[task] if task else sorted({m for row in TASKS.values() for m in row})
    if metric is not None and metric not in known:
        raise ValueError(f"metric={metric!r}: expected {', '.join(known) or 'None'}")


def _batch(number: int, given: Mapping[str, Any]) -> dict[str, Array]:
    expect(f"batches[{number}]", given, Mapping, "a dict of arrays")
    found = {}
    for name, value in given.items():
        expect(f"batches[{number}]", name, str, "a dict of arrays by names of inputs")
        found[name] = np.asarray(value)
    if not found:
        raise InputError(f"batch {number} of the golden set has no inputs", help="leave it out")
    count = GoldenSet.size_of(found)
    for name, array in found.items():
        if array.ndim and len(array) != count and array.shape != (1,):
            raise InputError(
                f"batch {number} of the golden set has {count} examples, and {len(array)} of "
                f"{name!r}",
                because=f"the first axis of all arrays is the batch: {listing([*found])}",
                help="give arrays of one batch",
            )
    return found
