"""Examples as batches of tensors, in an order that the seed alone decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ortrain.cli.text_classification.classifier import Classifier
from ortrain.cli.text_classification.examples import Example
from ortrain.cli.text_classification.vocabulary import check_words

Batch = dict[str, torch.Tensor]


class Batches:
    """Examples in tokens, handed out a batch at a time.

    A batch is padded to its own longest example, no further. Nothing is sorted by length, so that
    every batch is a fair sample.

    Args:
        classifier: Gives the tokenizer and the order of the classes.
        examples: At least one.
        size: Examples in a batch; the last one of an epoch may have fewer.
        max_length: Tokens of an example that are read.
        seed: Decides the order of every epoch; None keeps the order of the examples.

    Raises:
        UsageError: The tokenizer knows no word of the texts.
    """

    def __init__(
        self,
        classifier: Classifier,
        examples: Sequence[Example],
        *,
        size: int,
        max_length: int,
        seed: int | None = None,
    ) -> None:
        encoded = classifier.tokenizer(
            [example.text for example in examples], truncation=True, max_length=max_length
        )
        check_words(classifier.tokenizer, encoded["input_ids"])
        self._columns = {name: list(rows) for name, rows in encoded.items()}
        index = {name: number for number, name in enumerate(classifier.labels)}
        self._labels = [index[example.label] for example in examples]
        self._tokenizer = classifier.tokenizer
        self._size = size
        self._seed = seed
        self._order_of: tuple[int, list[int]] = (-1, [])

    @property
    def examples(self) -> int:
        """The number of examples in an epoch."""
        return len(self._labels)

    @property
    def in_epoch(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.examples // self._size)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs.

        Returns:
            The tokenizer's tensors, ``(rows, longest)``, and ``labels``, ``(rows,)``, all int64.
        """
        epoch, position = divmod(step, self.in_epoch)
        rows = self._order(epoch)[position * self._size : (position + 1) * self._size]
        # One dict of lists, as the tokenizer makes it, pads several times faster than a list of
        # dicts does.
        chosen = {name: [values[row] for row in rows] for name, values in self._columns.items()}
        padded = self._tokenizer.pad(chosen, return_tensors="pt")
        batch: Batch = {name: padded[name] for name in self._columns}
        batch["labels"] = torch.tensor([self._labels[row] for row in rows])
        return batch

    def epoch(self) -> Iterator[Batch]:
        """The batches of the first epoch."""
        return (self.batch(step) for step in range(self.in_epoch))

    def _order(self, epoch: int) -> list[int]:
        # The order is computed, not drawn from a generator's state, so that a resumed run and the
        # other engine find the same one.
        if self._order_of[0] != epoch:
            if self._seed is None:
                order = list(range(self.examples))
            else:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                order = torch.randperm(self.examples, generator=generator).tolist()
            self._order_of = (epoch, order)
        return self._order_of[1]
