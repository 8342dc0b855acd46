"""Rows judged each in a process of its own, a crash or an endless run of which costs one row."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection

from tests.families.models import families
from tests.families.verdict import Outcome, Verdict, of_file

# Seconds of one file, and bytes of its process.
PATIENCE = 150.0
MEMORY = 6 * 2**30


def judged(keys: list[tuple[str, str]]) -> Iterator[tuple[str, str, Verdict, float]]:
    """Each family and exporter with its verdict and the seconds that it took, as they come."""
    context = multiprocessing.get_context("fork")
    for name, exporter in keys:
        start = time.monotonic()
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_judge, args=(name, exporter, sending), daemon=True)
        process.start()
        sending.close()
        try:
            there = receiving.poll(PATIENCE)
            verdict = Verdict.of(receiving.recv()) if there else None
        except EOFError:
            verdict = None
        if verdict is None:
            process.join(0.0 if process.is_alive() else 5.0)
            because = f"died ({process.exitcode})" if process.exitcode else "no end in time"
            verdict = Verdict(Outcome.REFUSED, f"the process: {because}")
        process.kill()
        process.join()
        receiving.close()
        yield name, exporter, verdict, time.monotonic() - start


def _judge(name: str, exporter: str, answers: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.alarm(int(PATIENCE) + 5)
    answers.send(asdict(of_file(families()[name], exporter)))
    os._exit(0)
