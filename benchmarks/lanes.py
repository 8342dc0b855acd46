"""Where contestants run: together in this process, or in one that their kind needs for itself."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from contestants import CONTESTANTS, Apart, Training, captures_of_process
from measurement import reason
from workloads import Workload


class Failed(Exception):
    """A contestant has raised an error; the message is that error's."""


class Lane:
    """Contestants that share a process."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self.trainings: dict[str, Training] = {}

    def enter(self, name: str) -> float:
        """Makes a contestant and returns the seconds of its first step."""
        training = Training(name, self.workload, self.device)
        training.wrap()
        seconds = training.turn(1, warm_up=0) / 1e3
        self.trainings[name] = training
        return seconds

    def settle(self, name: str) -> None:
        """See :meth:`Training.settle`."""
        self.trainings[name].settle()

    def turn(self, name: str, steps: int, warm_up: int = 1) -> float:
        """See :meth:`Training.turn`."""
        return self.trainings[name].turn(steps, warm_up)

    def ran(self, name: str) -> str:
        """See :meth:`Training.ran`."""
        return self.trainings[name].ran()

    def captures(self, name: str) -> int:
        """Of the contestant; none before it has entered, but those of the process."""
        known = self.trainings.get(name)
        return known.captures if known is not None else captures_of_process(name)

    def leave(self, name: str) -> None:
        """Frees what a contestant holds."""
        self.trainings.pop(name, None)


class LaneApart:
    """The same in a process of its own, which waits while others have their turns."""

    def __init__(self, workload: Workload, device: str, apart: Apart, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, workload, device))
        with mock.patch.dict(os.environ, apart.environment(folder)):
            self.process.start()
        theirs.close()
        stack.callback(self.process.join)
        stack.callback(self.pipe.close)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the lane over there."""
        try:
            self.pipe.send((method, arguments))
            error, result = self.pipe.recv()
        except (EOFError, OSError):
            raise Failed("its process has ended") from None
        if error:
            raise Failed(error)
        return result


def _serve(pipe: Connection, workload: Workload, device: str) -> None:
    lane = Lane(workload, device)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("", getattr(lane, method)(*arguments)))
        except Exception as error:
            pipe.send((reason(error), None))


class Lanes:
    """All contestants of a workload, each where it can run; the processes end with the block.

    Args:
        workload: what they train.
        names: of contestants.
        device: on which.

    Attributes:
        names: of those that have raised no error so far.
        skipped: why the others are out.
    """

    def __init__(self, workload: Workload, names: Sequence[str], device: str = "cpu") -> None:
        self.workload, self.device = workload, device
        absent = {name: CONTESTANTS[name].absent(device) for name in names}
        self.skipped = {name: why for name, why in absent.items() if why}
        self.names = [name for name in names if name not in self.skipped]
        self._here = Lane(workload, device)
        self._apart: dict[Apart, LaneApart] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def ask(self, method: str, name: str, *arguments: Any) -> Any:
        """Calls a method of the contestant's lane; where it fails, None, and it is out."""
        if name in self.skipped:
            return None
        try:
            apart = CONTESTANTS[name].apart
            if apart is None:
                return getattr(self._here, method)(name, *arguments)
            if apart not in self._apart:
                self._apart[apart] = LaneApart(self.workload, self.device, apart, self._stack)
            return self._apart[apart].ask(method, name, *arguments)
        except Exception as error:
            self.skipped[name] = str(error) if isinstance(error, Failed) else reason(error)
            self.names.remove(name)
            self._here.leave(name)
            return None


def with_bases(names: Sequence[str]) -> list[str]:
    """The names in the order of the tables, and the eager ones that they are compared with."""
    wanted = {"eager", *names, *(CONTESTANTS[name].base for name in names)}
    return [name for name in CONTESTANTS if name in wanted]
