"""A process that judges rows, one after another, and a crash of which costs one row."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ortrain.config import Engine
from tests.sweep.verdict import Outcome, Verdict

ROOT = Path(__file__).parents[2]
# Of each row, in seconds; the first also waits for the imports.
PATIENCE = 120.0
STARTING = 60.0
# Of a worker's own memory, which is 1.3 GB once everything is loaded.
MEMORY = 4 * 2**30
# After so many rows a worker is replaced: what torch's exporter keeps of each adds up.
ROWS = 60


class Worker:
    """The parent's end of a process that judges rows.

    Args:
        engine: that runs the graphs.
        wider: how many samples of a row, and of which dtype; nothing for those of a plain sweep.
    """

    def __init__(self, engine: Engine, wider: Sequence[str] = ()) -> None:
        reading, writing = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sweep.worker", str(writing), engine, *wider],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writing,),
            env=environment,
            text=True,
            cwd=ROOT,
        )
        os.close(writing)
        self.answers = os.fdopen(reading)
        self.judged = 0

    def judge(self, key: str) -> Verdict | None:
        """The verdict on a row; None where the process died or took too long."""
        assert self.process.stdin is not None
        patience = PATIENCE + (0 if self.judged else STARTING)
        self.judged += 1
        try:
            print(key, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([self.answers], [], [], patience)
        line = self.answers.readline() if ready else ""
        if not line:
            return None
        return Verdict.of(json.loads(line))

    def stop(self) -> int | None:
        """Ends the process; the signal or status it had ended with before, None if it was alive."""
        ended = self.process.poll()
        if ended is None:
            self.process.kill()
        self.process.wait()
        self.answers.close()
        return ended


def judged(
    keys: list[str], jobs: int, engine: Engine, wider: Sequence[str] = ()
) -> Iterator[tuple[str, Verdict, float]]:
    """Each row with its verdict and the seconds that it took, as they come.

    Args:
        keys: of the rows.
        jobs: how many processes judge at the same time.
        engine: that runs the graphs.
        wider: how many samples of a row, and of which dtype; nothing for those of a plain sweep.
    """
    todo = list(reversed(keys))
    done: list[tuple[str, Verdict, float]] = []
    arrived = threading.Condition()

    def run() -> None:
        worker: Worker | None = None
        while True:
            with arrived:
                if not todo:
                    break
                key = todo.pop()
            worker = worker or Worker(engine, wider)
            start = time.monotonic()
            verdict = worker.judge(key)
            if verdict is None:
                time_is_up = time.monotonic() - start > PATIENCE
                ended = worker.stop()
                because = f"no end within {PATIENCE:.0f} s" if time_is_up else f"died ({ended})"
                verdict = Verdict(Outcome.RAISES, f"the process: {because}")
                worker = None
            elif worker.judged == ROWS:
                worker.stop()
                worker = None
            with arrived:
                done.append((key, verdict, time.monotonic() - start))
                arrived.notify()
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for _ in keys:
        with arrived:
            arrived.wait_for(lambda: done)
            found = done.pop(0)
        yield found


def main() -> None:
    """Reads keys of rows from the standard input, writes verdicts to the pipe that is named."""
    pipe, engine, *wider = sys.argv[1:]
    answers = os.fdopen(int(pipe), "w")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    import torch

    from tests.sweep.rows import all_rows
    from tests.sweep.verdict import ENGINES, SAMPLES, of_row

    torch.set_num_threads(1)
    most, dtype = (int(wider[0]), getattr(torch, wider[1])) if wider else (SAMPLES, None)
    (chosen,) = (each for each in ENGINES if each == engine)
    for line in sys.stdin:
        verdict = of_row(all_rows()[line.strip()], most, dtype, chosen)
        print(json.dumps(asdict(verdict)), file=answers, flush=True)


if __name__ == "__main__":
    main()
