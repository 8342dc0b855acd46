"""Commands that are killed, asked to end, or given no room; and what is there afterwards."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ortrain.cli import main
from ortrain.errors import InputError
from ortrain.files import checksums
from ortrain.ondevice import CheckpointState, optim
from ortrain.ondevice.artifacts import LossType, generate_artifacts
from tests.cli.tiny import make_model
from tests.fuzz.forked import Ended, Operations, command, told

FINE = "whole"
ENDING = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@dataclass
class Job:
    """A command, and how to see that its result is whole.

    Attributes:
        name: of the command.
        folder: in which it writes; emptied before each try.
        arguments: without those that resume.
        result: of a finished run; raises where it is not whole.
        resumable: whether there is something to go on from.
        left: names in the folder after a finished run.
        operations: that a run does to files.
        seconds: that a run takes.
    """

    name: str
    folder: Path
    arguments: list[str]
    result: Callable[[], object]
    resumable: Callable[[], bool]
    left: set[str]
    expected: object = None
    operations: int = 0
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def measure(self) -> None:
        """Runs the command undisturbed: what the others are compared with."""
        self.clear()
        counter = self.folder.parent / f"{self.folder.name}.count"

        def counted() -> int:
            operations = Operations(self.folder)
            operations.watch()
            status = main(self.arguments)
            counter.write_text(str(operations.count))
            return status

        ended = command(counted)
        assert ended.status == 0, ended.err
        self.operations, self.seconds = int(counter.read_text()), ended.seconds
        self.expected = self.result()
        files = (path for path in self.folder.rglob("*") if path.is_file())
        self.sizes = sorted({path.stat().st_size for path in files})

    def clear(self) -> None:
        """Empties the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def run(self, *, before: Callable[[], None] = lambda: None, **ending: Any) -> Ended:
        """Runs the command in an empty folder."""
        self.clear()

        def call() -> int:
            before()
            return main(self.arguments)

        return command(call, **ending)

    def failing(self, number: int, fail: Callable[[], None], **ending: Any) -> Ended:
        """Runs it so that something happens before one of its operations on files."""
        return self.run(before=lambda: Operations(self.folder, number, fail).watch(), **ending)

    def afterwards(self) -> str:
        """Finishes what a disturbed run has left; ``"whole"``, or what is wrong."""
        if (fault := self._lost()) is not None:
            return fault
        arguments = [*self.arguments, *(["--resume"] if self.resumable() else [])]
        ended = command(lambda: main(arguments))
        if ended.status != 0:
            return f"the next run ended with {ended.status}: {ended.err.strip()[-300:]}"
        return self._lost() or self._untidy() or FINE

    def _lost(self) -> str | None:
        """What is wrong with a result that looks complete."""
        try:
            found = self.result()
        except FileNotFoundError:
            return None
        except (InputError, ValueError, OSError) as error:
            return f"the result is not whole: {error}"[:300]
        return None if found == self.expected else "the result is another one"

    def _untidy(self) -> str | None:
        names = {path.name for path in self.folder.iterdir()}
        return None if names == self.left else f"{sorted(names)} are left"


def training(folder: Path, *, onnx: bool) -> Job:
    """``ortrain train``, of a tiny model, with checkpoints at every other step."""
    place = folder / "inputs"
    if not place.exists():
        make_model(place / "model")
        rows = [
            (f"the {n} was {a}", "ny"[a in ("good", "great")])
            for n in ("film", "plot")
            for a in ("good", "bad", "great", "poor")
        ]
        for name in ("train.csv", "eval.csv"):
            text = "".join(f"{a},{b}\n" for a, b in [("text", "label"), *rows])
            (place / name).write_text(text)
    job = folder / ("train-onnx" if onnx else "train")
    output = job / "out"

    def result() -> object:
        if not output.exists():
            raise FileNotFoundError
        checksums.check(output, whole=True)
        names = {path.name for path in output.iterdir()} - {"checkpoint"}
        with safe_open(output / "model.safetensors", framework="np") as file:
            return names, told({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def resumable() -> bool:
        unfinished = output.with_name("out.unfinished")
        kept = unfinished / "checkpoint" / "state.pt"
        return output.exists() or kept.exists() or checksums.is_written(unfinished)

    arguments = ["train", "text-classification", "--model", str(place / "model")]
    arguments += ["--train", str(place / "train.csv"), "--eval", str(place / "eval.csv")]
    arguments += ["--output", str(output), "--engine", "torch", "--epochs", "3"]
    arguments += ["--batch-size", "2", "--checkpoint-every", "2", "--learning-rate", "0.01"]
    arguments += ["--max-length", "8"]
    arguments += [] if onnx else ["--no-onnx"]
    return Job(f"ortrain {job.name}", job, arguments, result, resumable, {"out"})


def on_device(folder: Path) -> Job:
    """``ortrain ondevice run``, with a checkpoint at every other update."""
    place = folder / "artifacts"
    if not place.exists():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
        generate_artifacts(
            net,
            loss=LossType.MSELoss,
            optimizer=optim.AdamW(),
            artifact_directory=place,
            example_inputs=[torch.zeros(2, 3)],
        )
        rows = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
        names = [value.name for value in _inputs(place / "train_step_model.onnx")][:2]
        np.savez(place / "data.npz", **{names[0]: rows[:, :3], names[1]: rows[:, 3:]})
    job = folder / "ondevice"
    file = job / "trained"

    def result() -> object:
        state = CheckpointState.load_checkpoint(file)
        if state.step < 18:
            raise FileNotFoundError  # a checkpoint of the way
        return state.step, told({name: item.data for name, item in state.parameters})

    arguments = ["ondevice", "run", str(place), "--data", str(place / "data.npz")]
    arguments += ["--checkpoint", str(file), "--epochs", "3", "--batch-size", "4"]
    arguments += ["--checkpoint-every", "2"]

    def whole() -> object:
        if not file.exists():
            raise FileNotFoundError
        return result()

    return Job("ortrain ondevice run", job, arguments, whole, file.exists, {"trained"})


def _inputs(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()


# -- what happens to them ------------------------------------------------------------------------


def killed(job: Job, *, number: int | None = None, after: float | None = None) -> str:
    """Ends it by SIGKILL, before an operation on files or after some seconds."""
    if number is not None:
        ended = job.failing(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        ended = job.run(after=after, sent=signal.SIGKILL)
    if ended.status not in (-signal.SIGKILL, 0):
        return f"ended with {ended.status}: {ended.err[-300:]}"
    return job.afterwards()


def asked(job: Job, sent: int, *, number: int | None = None, after: float | None = None) -> str:
    """Asks it to end by a signal."""
    if number is not None:
        ended = job.failing(number, lambda: os.kill(os.getpid(), sent))
    else:
        ended = job.run(after=after, sent=sent)
    if ended.status == -sent and after is not None:
        return job.afterwards()  # the signal came before the command had begun
    lines = ended.err.strip().splitlines()
    if ended.status not in (0, ENDING[sent]) or "Traceback" in ended.err:
        return f"ended with {ended.status}: {ended.err[-300:]}"
    if ended.status and not re.match("interrupted", lines[-1]):
        return f"said {lines}"
    return job.afterwards()


def cramped(job: Job, limit: int) -> str:
    """Gives it a limit of file sizes."""
    ended = job.run(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    return _one_line(ended) or job.afterwards()


def refused(job: Job, number: int) -> str:
    """Lets one of its operations on files fail as on a full disk."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return _one_line(job.failing(number, full)) or job.afterwards()


def _one_line(ended: Ended) -> str | None:
    """What is wrong with how a command ended that could not go on."""
    errors = [line for line in ended.err.splitlines() if not line.startswith("step ")]
    if ended.status == 0 and not errors:
        return None
    if ended.status == 2 and len(errors) == 1 and errors[0].startswith("ortrain: error: "):
        return None
    return f"ended with {ended.status}: {ended.err.strip()[-300:]}"


def spread(count: int, total: int) -> Iterator[int]:
    """Numbers from 1 to the total, at most so many, evenly; the last one among them."""
    count = min(count, total)
    return (round((i + 1) * total / count) for i in range(count))
