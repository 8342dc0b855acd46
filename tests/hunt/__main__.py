"""Hunts for programs that do something else as a graph than in PyTorch.

    python -m tests.hunt --write                   the whole hunt, and its results
    python -m tests.hunt --minutes 1               the first programs, a minute of them
    python -m tests.hunt --seed 17 --engine aten   one program; if it differs, the shortest file
    python -m tests.hunt --compiled --write        the same through the backend of torch.compile

Each program runs on one engine in turn; one in twenty runs also with the default options and many
steps to come. Workers are processes: a crash or a hang is a difference like others. Where numbers
differ that differ as much in PyTorch from weights that are some roundings away, roundings were
magnified, which is counted and no difference. What is found is shortened after the hunt.
``results.json`` has the results by version of torch: differences, what share of calls ran as a
graph, and why the others did not. The hunt fails if a program differs that does not differ so in
there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch

from tests.hunt.fronts import Counts
from tests.hunt.programs import COMPILED, ENGINES, Program, kind_of, program

RESULTS = Path(__file__).with_name("results.json")
# Where all rows go, to be looked at.
BUILD = Path(__file__).parents[2] / "build"
WORKERS = 2
# Of one program, in seconds.
LIMIT = 180
# Programs of one process, which grows and becomes slow: 2.3 seconds a program, 6 after 600 of them.
LONGEST = 50
DEFAULT = {"engine": "auto", "steps_to_come": 10**6}
Row = dict[str, Any]


def ways(seed: int, compiled: bool = False) -> list[dict[str, Any]]:
    """How a program is run: on an engine; one in twenty by default, too."""
    engine = ENGINES[seed // 2 % len(ENGINES)]
    if compiled:
        also = [{"engine": "compiled plainly"}] if seed % 20 == 7 else []
        return [{"engine": f"compiled {engine}"}, *also]
    each: list[dict[str, Any]] = [{"engine": engine}]
    return [*each, DEFAULT] if seed % 20 == 7 else each


def made_for(seed: int, way: dict[str, Any]) -> Program:
    """The program of a seed, as it is run in a way."""
    made = program(seed)
    if way["engine"] in COMPILED and seed % 3 == 0 and not made.kind:
        return made.broken()
    return made.longer() if way == DEFAULT else made


def hunted(seed: int, way: dict[str, Any]) -> Row:
    """What came of one program."""
    made = made_for(seed, way)
    start = time.monotonic()
    row: Row = {"seed": seed, "engine": way["engine"], **asdict(Counts())}
    try:
        row |= asdict(made.run(**way, closely=True))
    except Exception as error:
        found = {"difference": kind_of(error), "message": str(error)[:2000], "names": made.names}
        known = [each for each in ("magnified", "inherited") if getattr(error, each, False)]
        row |= {known[0]: True} if known else found
    return {**row, "seconds": round(time.monotonic() - start, 2)}


def work() -> None:
    """A worker: seeds and ways come in, a line each, and rows go out."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(hunted(*json.loads(line))), flush=True)


class Worker:
    """A process that hunts, and is started again where it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.programs = 0

    def row(self, seed: int, way: dict[str, Any]) -> Row:
        """What came of one program."""
        if self.programs % LONGEST == 0:
            self.close()
        if self.process is None:
            command = [sys.executable, "-W", "ignore", "-m", "tests.hunt", "--work"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True,
            )  # fmt: skip
        process = self.process
        self.programs += 1
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(LIMIT, process.kill)
        timer.start()
        try:
            print(json.dumps([seed, way]), file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("{"):  # programs print, too
                    row: Row = json.loads(line)
                    return row
        except BrokenPipeError:
            pass
        finally:
            late = not timer.is_alive()
            timer.cancel()
        self.close()
        ended = "hangs" if late else f"the process died ({process.returncode})"
        row = {"seed": seed, "engine": way["engine"], **asdict(Counts()), "seconds": float(LIMIT)}
        return {**row, "difference": ended, "message": ended, "names": made_for(seed, way).names}

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            with self.process:  # waits for it, and closes the pipes
                self.process = None


def hunt(
    seeds: Sequence[int], until: float, rows: Sequence[Row] = (), compiled: bool = False
) -> Iterator[Row]:
    """What came of each program, until a time of ``time.monotonic``.

    Args:
        seeds: of the programs.
        until: the end.
        rows: those that there are already.
        compiled: whether they go through the backend.
    """
    there = {(row["seed"], row["engine"]) for row in rows}
    todo: Queue[tuple[int, dict[str, Any]]] = Queue()
    done: Queue[Row | None] = Queue()
    for seed in seeds:
        for way in ways(seed, compiled):
            if (seed, way["engine"]) not in there:
                todo.put((seed, way))

    def run() -> None:
        worker = Worker()
        try:
            while time.monotonic() < until:
                done.put(worker.row(*todo.get_nowait()))
        except Empty:
            pass
        finally:
            worker.close()
            done.put(None)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < len(threads):
        row = done.get()
        ended += row is None
        if row is not None:
            yield row


def kept_rows(path: Path) -> list[Row]:
    """What a hunt that was stopped has found."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(rows: list[Row], minutes: float) -> Row:
    """Of a hunt: what is written down."""
    engines: Row = {}
    for engine in sorted({row["engine"] for row in rows}):
        of = [row for row in rows if row["engine"] == engine]
        graph, calls = sum(r["graph"] for r in of), sum(r["graph"] + r["eager"] for r in of)
        engines[engine] = {
            "programs": len(of),
            "differences": sum("difference" in r for r in of),
            "magnified roundings": sum("magnified" in r for r in of),
            "differences without ortrain as well": sum("inherited" in r for r in of),
            "calls": calls,
            "outputs that share memory otherwise": sum(r["copies"] for r in of),
            "share of calls that ran as a graph": round(graph / max(calls, 1), 3),
        }
        if engine in COMPILED:
            sums = {key: sum(r[key] for r in of) for key in ("graphs", "parted", "pytorchs")}
            engines[engine]["graphs: whole, in part, not"] = [*sums.values()]
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        for reason in row["reasons"]:
            reasons.setdefault(reason, []).append(row)
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if "difference" in row:
            kinds.setdefault(row["difference"], []).append(row)
    return {
        "programs": len({row["seed"] for row in rows}),
        "minutes": round(minutes, 1),
        "engines": engines,
        "differences": [
            {
                "what": what,
                "programs": [[r["seed"], r["engine"]] for r in of],
                "one": of[0]["message"].split("\n")[0][:400],
            }
            for what, of in sorted(kinds.items(), key=lambda item: -len(item[1]))
        ],
        "reasons": {
            reason: {"programs": len(of), "one": [of[0]["seed"], of[0]["engine"]]}
            for reason, of in sorted(reasons.items(), key=lambda item: -len(item[1]))[:80]
        },
    }


def unknown(found: list[Row], known: list[Row]) -> list[list[Any]]:
    """Seeds and engines of programs that differ, and do not so among those that are known."""
    before = {(of["what"], *each) for of in known for each in of["programs"]}
    return [each for of in found for each in of["programs"] if (of["what"], *each) not in before]


def shortest(row: Row) -> tuple[Program, Exception]:
    """The shortest program that differs as one did."""
    way = DEFAULT if row["engine"] == "auto" else {"engine": row["engine"]}
    return made_for(row["seed"], way).shortest(**way, closely=True)


def main() -> None:
    """Hunts, and tells what it found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hunt",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--engine", choices=(*ENGINES, "auto", *COMPILED))
    parser.add_argument("--compiled", action="store_true", help="through torch.compile's backend")
    parser.add_argument("--resume", action="store_true", help="what was stopped, from build/")
    parser.add_argument("--write", action="store_true", help="results.json")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work()
        return
    torch.set_num_threads(1)
    if asked.seed is not None:
        engine = asked.engine or ways(asked.seed, asked.compiled)[0]["engine"]
        row = hunted(asked.seed, DEFAULT if engine == "auto" else {"engine": engine})
        print(json.dumps(row, indent=1))
        if "difference" in row:
            made, error = shortest(row)
            print(f"{made.source(engine)}\n# {error}")
        return
    start, rows = time.monotonic(), list[Row]()
    version = torch.__version__.split("+")[0]
    seeds = range(asked.first, asked.first + asked.count)
    name = f"{version}, compiled" if asked.compiled else version
    kept = BUILD / f"hunt-{name.replace(', ', '-')}{'' if asked.write else '-part'}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    if asked.resume:
        rows += kept_rows(kept)
    else:
        kept.unlink(missing_ok=True)
    before = sum(row["seconds"] for row in rows) / WORKERS
    for row in hunt(seeds, start + 60 * asked.minutes, rows[:], asked.compiled):
        rows.append(row)
        with kept.open("a") as file:
            print(json.dumps(row), file=file)
        if len(rows) % 100 == 0:
            print(f"{len(rows)} runs in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        if "difference" in row:
            first = row["message"].split("\n")[0][:300]
            print(
                f"{row['seed']} {row['engine']}: {first}\n    {', '.join(row['names'])}", flush=True
            )
    found = summary(rows, (before + time.monotonic() - start) / 60)
    print(json.dumps(found, indent=1))
    whole = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = [each for of in whole.values() for each in of["differences"]]
    new = unknown(found["differences"], known)
    if asked.write:
        whole[name] = found
        RESULTS.write_text(json.dumps(whole, indent=1) + "\n")
    for seed, engine in new:
        made, error = shortest({"seed": seed, "engine": engine})
        print(f"### {seed} {engine}\n{made.source(engine)}\n# {error}", flush=True)
    sys.exit(bool(new))


if __name__ == "__main__":
    main()
