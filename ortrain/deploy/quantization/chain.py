"""``Chain``: what the files of a folder are fed with, where one gives what the next one takes.

An encoder's states go to its decoder, and a decoder's keys and values come back as its cache: files
are calibrated on the values that they see when the model generates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ortrain.deploy.quantization.inputs import Described, Inputs
from ortrain.errors import InputError, listing

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]

_PAST = re.compile(r"past_key_values\.(.+)")
_PRESENT = re.compile(r"present(?:_key_values)?\.(.+)")
_STATES = "encoder_hidden_states"
_IDS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"


class Chain:
    """The files of a model in the order in which they run.

    Args:
        files: file → its inputs.
    """

    def __init__(self, files: Mapping[str, Inputs]) -> None:
        self._files = dict(files)
        self.order = sorted(files, key=lambda name: (self._stage(name), name))

    def columns(self) -> set[str]:
        """Names that a batch may have."""
        names = {name for inputs in self._files.values() for name in inputs}
        return names | {"decoder_input_ids", "labels", _MASK, _IDS}

    def ranks(self) -> dict[str, int]:
        """Column → axes of a batch of it, where all files agree."""
        found: dict[str, int] = {}
        for inputs in self._files.values():
            for name, (_, rank, _) in inputs.items():
                if rank is not None:
                    found.setdefault(name, rank)
        if _IDS in found:
            for name in ("decoder_input_ids", "labels") if len(self._files) > 1 else ():
                found.setdefault(name, found[_IDS])
        return found

    def run(self, batch: Arrays, run: Mapping[str, Run]) -> None:
        """Runs every file on a batch, a decoder with a cache twice: without and with one.

        Args:
            batch: columns of the data.
            run: file → what runs it and gives its outputs.

        Raises:
            InputError: an input is neither in the batch nor what another file gives.
        """
        given: Arrays = {}
        for file in self.order:
            inputs = self._files[file]
            past = [name for name in inputs if _PAST.fullmatch(name)]
            if inputs.keys() <= batch.keys():  # the data has all of it
                given.update(_passed_on(run[file](batch), encoder=self._stage(file) == 0))
                continue
            feeds = {**batch, **given}
            paired = _STATES in inputs or any(".encoder." in name for name in past)
            if paired:
                feeds = self._decoder(feeds)
            if past and not set(past) <= feeds.keys():
                feeds.pop(_POSITIONS, None)
                self._twice(file, feeds, past, run[file])
                continue
            if past and _IDS in feeds and set(past) <= given.keys():
                feeds[_IDS] = feeds[_IDS][:, -1:]
            elif not past:
                feeds = self._begin(file, feeds)
            outputs = run[file](_complete(feeds, inputs))
            given.update(_passed_on(outputs, encoder=self._stage(file) == 0))

    def _stage(self, file: str) -> int:
        inputs = self._files[file]
        if _STATES in inputs:
            return 1
        if any(_PAST.fullmatch(name) for name in inputs):
            return 2
        return 0

    def _begin(self, file: str, feeds: Arrays) -> Arrays:
        """All tokens but the last where another file goes on with that one."""
        goes_on = any(self._stage(other) == 2 for other in self._files if other != file)
        ids = feeds.get(_IDS)
        if self._stage(file) != 1 or not goes_on or ids is None or ids.shape[1] < 2:
            return feeds
        mask = {_MASK: feeds[_MASK][:, :-1]} if _MASK in feeds else {}
        return {**feeds, **mask, _IDS: ids[:, :-1]}

    def _decoder(self, feeds: Arrays) -> Arrays:
        """A batch in the names of a decoder with an encoder: its ids are those of the answer."""
        ids = feeds.get("decoder_input_ids", feeds.get("labels"))
        if ids is None:
            raise InputError(
                "the calibration data has nothing that the decoder reads",
                because=f"its columns are {listing(sorted(feeds))}",
                help="add the tokens of the answers as decoder_input_ids, or as labels",
            )
        feeds = dict(feeds)
        if _MASK in feeds:
            feeds.setdefault("encoder_attention_mask", feeds.pop(_MASK))
        feeds[_IDS] = np.maximum(ids, 0)  # of labels, -100 stands where there is none
        if "decoder_attention_mask" in feeds:
            feeds[_MASK] = feeds["decoder_attention_mask"]
        return feeds

    def _twice(self, file: str, feeds: Arrays, past: Sequence[str], run: Run) -> None:
        """The tokens without a cache, but for the last one, and that one with their cache."""
        inputs = self._files[file]
        ids = feeds.get(_IDS)
        if ids is None:
            raise InputError(
                f"the calibration data has neither {_IDS} nor a cache for {file}",
                because=f"its columns are {listing(sorted(feeds))}",
                help=f"add {_IDS}, or {past[0]} and the others",
            )
        rows, length = ids.shape
        there = {name: feeds[name] for name in past if name in feeds}
        empty = {name: _empty(name, inputs[name], rows) for name in past if name not in there}
        mask = feeds.get(_MASK, np.ones((rows, length), np.int64))
        before = max(length - 1, 0)
        outputs: Arrays = {}
        if before:
            first = {**feeds, **empty, _IDS: ids[:, :before], _MASK: mask[:, :before]}
            outputs = run(_complete(first, inputs))
        presents = {
            f"past_key_values.{found.group(1)}": array
            for name, array in outputs.items()
            if (found := _PRESENT.fullmatch(name))
        }
        last = {**feeds, **empty, **presents, _IDS: ids[:, before:], _MASK: mask}
        run(_complete(last, inputs))


def _passed_on(outputs: Arrays, *, encoder: bool) -> Arrays:
    """What files behind this one take of its outputs."""
    found = {
        f"past_key_values.{match.group(1)}": array
        for name, array in outputs.items()
        if (match := _PRESENT.fullmatch(name))
    }
    if encoder and "last_hidden_state" in outputs:
        found[_STATES] = outputs["last_hidden_state"]
    return found


def _complete(feeds: Arrays, inputs: Inputs) -> Arrays:
    """With what follows from the rest: masks of ones, positions, the switch of a merged decoder."""
    feeds = dict(feeds)
    ids = feeds.get(_IDS)
    if ids is None:
        return feeds
    past = next((feeds[name] for name in feeds if _PAST.fullmatch(name)), None)
    length = 0 if past is None or past.ndim < 2 else past.shape[-2]
    if _MASK in inputs and _MASK not in feeds:
        feeds[_MASK] = np.ones((ids.shape[0], length + ids.shape[1]), np.int64)
    if _POSITIONS in inputs and _POSITIONS not in feeds:
        mask = feeds.get(_MASK, np.ones((ids.shape[0], length + ids.shape[1]), np.int64))
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        feeds[_POSITIONS] = positions[:, -ids.shape[1] :]
    if "token_type_ids" in inputs and "token_type_ids" not in feeds:
        feeds["token_type_ids"] = np.zeros_like(ids)
    if "use_cache_branch" in inputs:
        feeds["use_cache_branch"] = np.asarray([length > 0])
    return feeds


def _empty(name: str, described: Described, rows: int) -> np.ndarray:
    """A cache of no tokens: ``[batch, heads, 0, size]``."""
    dtype, rank, sizes = described
    if rank != 4 or not isinstance(sizes[1], int) or not isinstance(sizes[3], int):
        raise InputError(
            f"the calibration data has no {name}",
            because=f"its axes are {list(sizes)}, of which an empty cache cannot be made",
            help="add it to the data",
        )
    return np.zeros((rows, sizes[1], 0, sizes[3]), dtype)
