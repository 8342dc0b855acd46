"""What the benchmarks share: turns, medians, processes of their own, and where results are kept."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import processor

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


class ProcessFailed(Exception):
    """A measurement in a process of its own has failed; the message is its last line."""


# --- turns --------------------------------------------------------------------------------------


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """The names in so many rounds; each round another one is first."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def alternate(
    functions: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each call of some functions, in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name in turns([*functions], warm_up + rounds):
        times[name].append(milliseconds(functions[name]))
    return {name: values[warm_up:] for name, values in times.items()}


def milliseconds(function: Callable[[], Any]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def waited(function: Callable[[], Any], host: list[float]) -> Callable[[], None]:
    """The function, and a wait for the GPU; to ``host`` go milliseconds until it returned."""
    import torch

    def call() -> None:
        host.append(milliseconds(function))
        torch.cuda.synchronize()

    return call


def compared(times: Mapping[str, list[float]], base: str | None = None) -> dict[str, Row]:
    """Medians and spreads in milliseconds, and ``ratio``: the median of time over the base's.

    Args:
        times: of the same rounds, by name.
        base: a name; the first without it.
    """
    reference = times[base or next(iter(times))]
    return {
        name: {
            "median_ms": statistics.median(values),
            "min_ms": min(values),
            "max_ms": max(values),
            "ratio": ratio(values, reference),
        }
        for name, values in times.items()
    }


def ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """The median of what each value is of the reference's in the same round."""
    return statistics.median(v / r for v, r in zip(values, reference, strict=True))


def table(title: str, rows: Mapping[str, Row], more: Callable[[Row], str] = lambda row: "") -> str:
    """Rows of :func:`compared` as text.

    Args:
        title: of the first column.
        rows: by name; one with ``skipped`` says why it has no figures.
        more: what stands behind a row.
    """
    width = max(len(title), *(len(name) + 2 for name in rows)) + 2
    lines = [f"{title:<{width}}{'median':>12}{'min':>12}{'max':>12}{'speed-up':>10}"]
    for name, row in rows.items():
        if "skipped" in row:
            lines.append(f"  {name:<{width - 2}}skipped: {row['skipped']}")
            continue
        columns = "".join(f"{row[key]:>10.3f}ms" for key in ("median_ms", "min_ms", "max_ms"))
        lines.append(f"  {name:<{width - 2}}{columns}{1 / row['ratio']:>9.2f}x{more(row)}")
    return "\n".join(lines)


# --- processes ----------------------------------------------------------------------------------


def in_a_process(
    script: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> Row:
    """Runs ``script --child ARGUMENTS`` alone; returns the JSON object in its last line.

    Args:
        script: its path.
        *arguments: behind ``--child``.
        environment: variables beside this process's own.
        limit: seconds, after which it is stopped.

    Raises:
        ProcessFailed: it ended with an error, or was stopped.
    """
    command = [sys.executable, script, "--child", *arguments]
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=variables, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"it took more than {limit:.0f} s") from None
    if done.returncode:
        raise ProcessFailed(last_line(done.stderr))
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def last_line(text: str) -> str:
    """What a process that failed has said last."""
    lines = [line for line in text.splitlines() if line and not line.startswith(" ")]
    return lines[-1] if lines else "it ended without a word"


def reason(error: BaseException) -> str:
    """An error in one line, with what it says of the cause."""
    because = getattr(error, "because", "")
    told = str(error).partition(chr(10))[0]
    return f"{type(error).__name__}: {told}{f' ({because})' if because else ''}"


# --- results ------------------------------------------------------------------------------------


def arguments(description: str | None, rounds: int | None = 9) -> argparse.ArgumentParser:
    """The command line that all benchmarks have; without rounds, no option for them."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="(%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="in place of results/<processor>/<benchmark>.json"
    )
    return parser


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """What reads an argument that is one of these; argparse's own choices refuse a default list."""

    def read(argument: str) -> str:
        if argument not in names:
            raise argparse.ArgumentTypeError(f"{argument}: expected one of {', '.join(names)}")
        return argument

    return read


class Results:
    """What one benchmark has found on one machine, and the file that keeps it.

    Args:
        benchmark: names the file.
        path: another file.
        device: ``"cuda"`` keeps the results under the GPU's name.
        alike: facts of the machine that have to be the same for results to stay; all by default.
    """

    def __init__(
        self,
        benchmark: str,
        path: Path | None = None,
        device: str = "cpu",
        alike: Sequence[str] = (),
    ) -> None:
        self.machine, self.alike = processor.facts(device), alike
        self.path = path or file_of(benchmark, self.machine)
        print("  ".join(f"{key}={value}" for key, value in self.machine.items() if key != "flags"))

    def kept(self) -> Row:
        """What the file has that stays."""
        before: Row = json.loads(self.path.read_text()) if self.path.exists() else {}
        machine = before.get("machine", {})
        names = self.alike or {*machine, *self.machine}
        alike = all(machine.get(name) == self.machine.get(name) for name in names)
        return before if before and alike else {}

    def save(self, **found: Any) -> None:
        """Writes the file: what the same machine has found before and is not found anew stays.

        Rows that were compared with each other stay together: a run that has only some of them is
        written beside the file.
        """
        kept = self.kept()
        if self.path.exists() and not kept:
            print(f"{self.path}: what other versions had found there is replaced")
        path = self.path
        for name, value in found.items():
            if isinstance(value, dict) and isinstance(kept.get(name), dict):
                anew = {each: kept[name][each] for each in kept[name].keys() & value.keys()}
                if missing := [*rows_missing(anew, value)]:
                    path = self.path.with_suffix(".part.json")
                    print(f"{path}: {self.path.name} has also {', '.join(missing)}")
                found[name] = {**kept[name], **value}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {**kept, "machine": self.machine, **found}
        path.write_text(json.dumps(whole, indent=1) + "\n")


def rows_missing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The names of the objects, at any depth, that were there and are not."""
    for name, value in before.items():
        if not isinstance(value, dict):
            continue
        if name not in now:
            yield name
        elif isinstance(now[name], dict):
            yield from rows_missing(value, now[name])


def file_of(benchmark: str, machine: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Where a machine's results are kept: in the folder of its processor, or in one beside it.

    Beside it where that has another's: of another number of cores, or by another name.
    """
    slug, cores = machine["slug"], f"{machine['cores']}-cores"
    name = processor.plain(machine["processor"])
    for each in (slug, f"{slug}-{cores}"):
        path: Path = folder / each / f"{benchmark}.json"
        other = json.loads(path.read_text())["machine"] if path.exists() else machine
        if all(other.get(key) == machine.get(key) for key in ("gpu", "processor", "cores")):
            return path
    return folder / f"{slug}-{name}-{cores}" / f"{benchmark}.json"
