"""Which nodes of a model change its answers most when they are quantized."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ortrain.deploy.progress import tracked
from ortrain.deploy.quantization.inputs import described, fed
from ortrain.errors import ExecutionError, InputError

Batches = Sequence[Mapping[str, np.ndarray]]

# Examples that show which nodes are the most sensitive ones, where nobody has chosen others.
ENOUGH = 128


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How much one node's quantization changes the outputs.

    Attributes:
        node: its name.
        operator: what it is.
        file: the ONNX file that it is in.
        largest: the largest absolute difference of an output's element.
        mean: the mean absolute difference.
        signal_to_noise: of all outputs, in decibels: ten times the logarithm of the sum of squares
            over the sum of squared differences. Infinite where nothing changes.
    """

    node: str
    operator: str
    file: str
    largest: float
    mean: float
    signal_to_noise: float

    def to_dict(self) -> dict[str, Any]:
        """In plain values; an infinity is None, which JSON can say."""
        values = asdict(self)
        if not np.isfinite(self.signal_to_noise):
            values["signal_to_noise"] = None
        return values


def evenly(batches: Batches, examples: int = ENOUGH) -> Batches:
    """Batches of at least so many examples, evenly spaced; all where there are no more.

    Args:
        batches: inputs by their names, each an array with the batch as its first axis.
        examples: that are enough.
    """
    rows = [len(next(iter(batch.values()))) for batch in batches]
    for count in range(1, len(batches)):
        places = [i * len(batches) // count for i in range(count)]
        if sum(rows[place] for place in places) >= examples:
            return [batches[place] for place in places]
    return batches


def measure(
    before: Path,
    variants: Iterable[tuple[str, str, Callable[[Path], Path]]],
    batches: Batches,
    *,
    provider: str = "CPUExecutionProvider",
) -> list[Sensitivity]:
    """Compares variants of a model with it.

    Args:
        before: the ONNX file.
        variants: the node that each is about, its operator, and what writes the variant into a
            folder and gives its path; one at a time is on the disk.
        batches: to run both on; what is no input is left out.
        provider: execution provider of onnxruntime.

    Returns:
        One entry a variant, those that change most first. A variant that gives NaN where the model
        gives a number is before all others.

    Raises:
        ExecutionError: onnxruntime cannot run one of them.
    """
    reference = _outputs(before, batches, provider)
    found = []
    for node, operator, write in tracked(variants, "measuring nodes", "node"):
        with tempfile.TemporaryDirectory(prefix="ortrain-sensitivity-") as folder:
            try:
                path = write(Path(folder))
            except InputError:  # it cannot be quantized alone, as where a mask has no range
                continue
            after = _outputs(path, batches, provider)
        largest, mean, ratio = _difference(reference, after)
        found.append(
            Sensitivity(
                node=node,
                operator=operator,
                file=before.name,
                largest=largest,
                mean=mean,
                signal_to_noise=ratio,
            )
        )
    return sorted(found, key=lambda each: (each.signal_to_noise, -each.largest))


def _outputs(path: Path, batches: Batches, provider: str) -> list[np.ndarray]:
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=[provider])
        inputs = described(session)
        found: list[np.ndarray] = []
        for batch in batches:
            found += [np.asarray(each) for each in session.run(None, fed(batch, inputs))]
        return found
    except InputError:
        raise
    except Exception as error:  # onnxruntime's own classes, one for each status
        raise ExecutionError(
            f"onnxruntime cannot run {path.name} on the golden set",
            because=str(error).splitlines()[0],
            help="see whether the model runs on it as it is",
        ) from error


def _difference(
    before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> tuple[float, float, float]:
    largest = total = signal = noise = 0.0
    count = 0
    for old, new in zip(before, after, strict=True):
        if old.dtype.kind != "f" or not old.size:
            continue
        here = np.isfinite(old)
        if not np.isfinite(new[here]).all():
            return float("inf"), float("inf"), float("-inf")
        wide = old[here].astype(np.float64)
        apart = np.abs(wide - new[here])
        largest = max(largest, float(apart.max(initial=0.0)))
        total += float(apart.sum())
        count += apart.size
        signal += float((wide**2).sum())
        noise += float((apart**2).sum())
    if noise == 0:
        return largest, 0.0, float("inf")
    ratio = 10 * float(np.log10(max(signal, np.finfo(np.float64).tiny) / noise))
    return largest, total / max(count, 1), ratio
