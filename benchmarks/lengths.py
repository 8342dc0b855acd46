"""Steps on texts of random lengths, against steps of one length and as many words.

    python benchmarks/lengths.py [--steps 100] [--contestants eager auto …]

The MiniLM shape trains on batches whose lengths are drawn from 20 to 128. Told are the seconds of
the first pass over them and the captures in it, and then, in turns, what a step of a later pass
takes and how that compares with steps of the mean length.
"""

from __future__ import annotations

import random
import statistics
from functools import partial

from contestants import CONTESTANTS
from lanes import Lanes, with_bases
from measurement import Results, Row, arguments, compared, one_of, ratio, table, turns
from workloads import Workload, minilm_of_lengths

SHORTEST, LONGEST = 20, 128


def drawn(steps: int) -> list[int]:
    """The lengths of the steps, always the same."""
    dice = random.Random(0)
    return [dice.randint(SHORTEST, LONGEST) for _ in range(steps)]


def measure(names: list[str], lengths: list[int], batch: int, rounds: int) -> dict[str, Row]:
    """A row for each contestant; its ratios are to eager, and to its own fixed length."""
    steps, mean = len(lengths), round(statistics.mean(lengths))
    title = f"MiniLM-L6 shape, batch {batch}"
    random_lengths, fixed = (
        Workload(title=title, make=partial(minilm_of_lengths, each, batch))
        for each in (lengths, [mean] * steps)  # padded alike: one batch may be fuller than most
    )
    with Lanes(random_lengths, names) as varying, Lanes(fixed, names) as steady:
        rows: dict[str, Row] = {}
        for name in names:
            before = varying.ask("captures", name) or 0
            first = varying.ask("enter", name)
            rest = varying.ask("turn", name, steps - 1, 0)
            if rest is not None and steady.ask("enter", name) is not None:
                captures = varying.ask("captures", name) - before
                rows[name] = {"first_pass_s": first + rest / 1e3, "captures": captures}
                steady.ask("settle", name)
        known = [*rows]
        times: dict[str, list[float]] = {name: [] for name in known}
        ones: dict[str, list[float]] = {name: [] for name in known}
        for name in turns(known, rounds):
            for lanes, spent in ((varying, times), (steady, ones)):
                found = lanes.ask("turn", name, steps)
                if found is not None:
                    spent[name].append(found / steps)
        skipped = steady.skipped | varying.skipped
    known = [name for name in known if name not in skipped]
    for name, row in compared({name: times[name] for name in known}, "eager").items():
        rows[name] |= row | {
            "fixed_length_ms": statistics.median(ones[name]),
            "ratio_fixed_length": ratio(times[name], ones[name]),
        }
    return {name: rows[name] if name in known else {"skipped": skipped[name]} for name in names}


def more(row: Row) -> str:
    """The other columns of the table."""
    return (
        f"{row['ratio_fixed_length']:>8.2f} of one length's"
        f"{row['first_pass_s']:>9.1f} s at first, {row['captures']} captures"
    )


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--contestants", nargs="+", type=one_of(CONTESTANTS))
    parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="(%(default)s)")
    options = parser.parse_args()
    results = Results("lengths", options.json)
    names = with_bases(options.contestants or [*CONTESTANTS])
    rows = measure(names, drawn(options.steps), options.batch, options.rounds)
    title = f"lengths {SHORTEST} to {LONGEST}, batch {options.batch}, {options.steps} steps"
    results.save(title=title, contestants=rows)
    print(table(title, rows, more))


if __name__ == "__main__":
    main()
