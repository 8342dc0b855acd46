"""Samplers by which processes that train together have samples of like complexity at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Sampler

from ortrain.kinds import NONE, expect, expect_number, expect_whole


class LoadBalancingDistributedSampler(Sampler[int]):
    """The samples of one process, each of about the complexity of those the others take with it.

    Samples are sorted by complexity, all of them or within groups of ``group_size`` neighbours. The
    k-th ones of all processes are neighbours in that order. Shuffling moves these rows of
    neighbours, or with ``group_size`` the groups.

    Args:
        dataset: a data set with a length and items by number.
        complexity_fn: sample → number; called once for each sample, at the first iteration.
        world_size: number of processes; by default of the process group.
        rank: of this process; by default in the process group.
        shuffle: another order in each epoch; the same in all processes.
        group_size: sort only so many neighbours at a time.
        seed: of the order, the same in all processes.
        drop_last: leave out what is too many for all processes to have the same number; else the
            first samples come again.
        random_level: from 0, the best balance, to 1: how much of the range of complexities is added
            at random before sorting.

    Raises:
        TypeError: an argument of another type.
        ValueError: a value that is out of range, an empty data set, or no process group where its
            size or rank is needed.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., int | float],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        expect("dataset", dataset, Sized, "a data set with a length")
        expect("complexity_fn", complexity_fn, Callable, "a function of a sample")  # type: ignore[arg-type]
        expect_whole("world_size", world_size, NONE)
        expect_whole("rank", rank, NONE)
        expect_whole("group_size", group_size, NONE)
        expect_whole("seed", seed)
        expect_number("random_level", random_level)
        if (world_size is None or rank is None) and not (
            distributed.is_available() and distributed.is_initialized()
        ):
            raise ValueError(
                "there is no process group: call torch.distributed.init_process_group before, or "
                "give world_size and rank"
            )
        self.world_size = distributed.get_world_size() if world_size is None else world_size
        self.rank = distributed.get_rank() if rank is None else rank
        if self.world_size < 1:
            raise ValueError(f"world_size={world_size}: expected 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: expected 0 to {self.world_size - 1}")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size={group_size}: expected 1 or more, or None")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level={random_level}: expected 0 to 1")
        count = len(dataset)
        share = count // self.world_size if drop_last else math.ceil(count / self.world_size)
        if share < 1:
            raise ValueError(f"a data set of {count} samples leaves none for some processes")
        self.dataset, self.complexity_fn = dataset, complexity_fn
        self.shuffle, self.group_size, self.seed = shuffle, group_size, seed
        self.drop_last, self.random_level = drop_last, random_level
        self.epoch = 0
        self.num_samples = share
        self.total_size = share * self.world_size
        self._complexities: torch.Tensor | None = None

    def rows(self) -> list[list[int]]:
        """The samples of an epoch, ``[num_samples][world_size]``: each row is taken at a time."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        keys = self._keys(generator)
        size = self.group_size or len(keys)
        starts = range(0, len(keys), size)
        groups = [start + keys[start : start + size].argsort(stable=True) for start in starts]
        if self.shuffle and self.group_size is not None:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        order = torch.cat(groups)
        rows = order[torch.arange(self.total_size) % len(order)].view(-1, self.world_size)
        if self.shuffle and self.group_size is None:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        found: list[list[int]] = rows.tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter([row[self.rank] for row in self.rows()])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch, by which its order is drawn."""
        expect_whole("epoch", epoch)
        self.epoch = epoch

    def _keys(self, generator: torch.Generator) -> torch.Tensor:
        """What the samples are sorted by."""
        if self._complexities is None:
            values = [self.complexity_fn(self.dataset[i]) for i in range(len(self.dataset))]
            self._complexities = torch.tensor(values, dtype=torch.float64)
        keys = self._complexities
        spread = int((keys.max() - keys.min()) * self.random_level) + 1
        if spread > 1:
            keys = keys + torch.randint(spread, (len(keys),), generator=generator)
        return keys


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of a balanced sampler's samples, as many in each process.

    Args:
        sampler: which samples a process takes; its ``drop_last`` is False.
        batch_fn: indices → batches of them, as many and as large as it likes.
        drop_last: leave out the batches beyond the least number of any process; else those with
            fewer have their first ones again.

    Raises:
        TypeError: an argument of another type.
        ValueError: ``sampler`` drops its last samples.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Sequence[Sequence[int]]],
        drop_last: bool = False,
    ) -> None:
        expect(
            "sampler",
            sampler,
            LoadBalancingDistributedSampler,
            "a LoadBalancingDistributedSampler",
        )
        if sampler.drop_last:
            raise ValueError("the sampler has drop_last=True: say it here, of batches, instead")
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._batches: list[list[int]] | None = None

    def generate_batches(self) -> None:
        """Makes the batches of the sampler's epoch.

        Raises:
            ValueError: ``batch_fn`` makes none for some process.
        """
        rows = self.sampler.rows()
        every = [
            [list(batch) for batch in self.batch_fn([row[rank] for row in rows])]
            for rank in range(self.sampler.world_size)
        ]
        counts = [len(batches) for batches in every]
        if not min(counts):
            raise ValueError(f"batch_fn made no batch for the process {counts.index(0)}")
        own = every[self.sampler.rank]
        total = min(counts) if self.drop_last else max(counts)
        self._batches = [own[i % len(own)] for i in range(total)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch, and makes its batches."""
        self.sampler.set_epoch(epoch)
        self.generate_batches()

    def _made(self) -> list[list[int]]:
        if self._batches is None:
            self.generate_batches()
        assert self._batches is not None
        return self._batches
