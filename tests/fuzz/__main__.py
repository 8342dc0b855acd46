"""Attacks everything that is read and written, from a seed; ``make fuzz``.

Usage: python -m tests.fuzz [--seed N] [--share X] [--keep FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from tests.cli import malformed
from tests.fuzz import damage, data, runs
from tests.fuzz.forked import each

FLIPS, TRUNCATIONS, MALFORMED = 2000, 500, 500
KILLS, SIGNALS, FAILURES = 100, 40, 100

GOOD = (damage.REFUSED, damage.SAME, runs.FINE, data.READ)

Row = tuple[str, str]
"""What was attacked and how; and what came of it."""


def attack(folder: Path, seed: int, share: float = 1.0) -> Iterator[Row]:
    """All attacks.

    Args:
        folder: to work in.
        seed: of all draws.
        share: of the numbers above.
    """
    generator = random.Random(seed)

    def part(count: int) -> int:
        return max(1, round(count * share))

    kinds = damage.kinds(folder / "files")
    for kind in kinds:
        for name, make, count in (
            ("bit flipped", damage.flips, FLIPS),
            ("cut off", damage.truncations, TRUNCATIONS),
        ):
            damaged = make(kind, -(-part(count) // len(kinds)), generator)
            for outcome in damage.outcomes(kind, damaged):
                yield f"{name}: {kind.name}", outcome
    cases = list(malformed.files(seed, part(MALFORMED)))
    for outcome in each(cases, data.reading(folder)):
        yield "malformed data", outcome
    yield from _commands(folder / "commands", generator, part)


def _commands(folder: Path, generator: random.Random, part: Callable[[int], int]) -> Iterator[Row]:
    jobs = [
        runs.training(folder, onnx=False),
        runs.training(folder, onnx=True),
        runs.on_device(folder),
    ]
    for job in jobs:
        job.measure()
        quarter = -(-part(KILLS) // (2 * len(jobs)))
        for number in runs.spread(quarter, job.operations):
            yield f"killed at a file: {job.name}", runs.killed(job, number=number)
        for _ in range(quarter):
            after = generator.uniform(0, 1.1 * job.seconds)
            yield f"killed at a time: {job.name}", runs.killed(job, after=after)
        sent = list(runs.ENDING)
        quarter = -(-part(SIGNALS) // (2 * len(jobs)))
        for index, number in enumerate(runs.spread(quarter, job.operations)):
            name = sent[index % len(sent)]
            yield f"{signal.Signals(name).name}: {job.name}", runs.asked(job, name, number=number)
        for index in range(quarter):
            name, after = sent[index % len(sent)], generator.uniform(0, 1.1 * job.seconds)
            yield f"{signal.Signals(name).name}: {job.name}", runs.asked(job, name, after=after)
        for size in job.sizes:
            for limit in (size - 1, size // 2):
                yield f"file-size limit: {job.name}", runs.cramped(job, limit)
        for number in runs.spread(-(-part(FAILURES) // len(jobs)), job.operations):
            yield f"full disk: {job.name}", runs.refused(job, number)


def counted(rows: Iterable[Row]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """How often each came of each attack, and what should not have come."""
    counts: dict[str, Counter[str]] = {}
    bad = []
    for name, outcome in rows:
        good = outcome in GOOD
        counts.setdefault(name, Counter())[outcome if good else "wrong"] += 1
        if not good:
            bad.append(f"{name}: {outcome}")
            print(bad[-1], file=sys.stderr, flush=True)
    return {name: dict(sorted(found.items())) for name, found in counts.items()}, bad


def main() -> int:
    """Runs the attacks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--keep", type=Path, help="where to write the counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ortrain-fuzz-") as folder:
        counts, bad = counted(attack(Path(folder), options.seed, options.share))
    total = sum(sum(found.values()) for found in counts.values())
    for name, found in counts.items():
        print(f"{name:<48} {', '.join(f'{n} {what}' for what, n in found.items())}")
    print(f"{total} attacks, {len(bad)} wrong")
    if options.keep is not None:
        rows = {"seed": options.seed, "attacks": total, "wrong": len(bad), "counts": counts}
        options.keep.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
