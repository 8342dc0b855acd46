"""One training step under each contestant, alternating by rounds.

    python benchmarks/step.py [bert minilm …] [--contestants eager aten-bf16 …] [--memory]

All contestants share one process, where their settings allow that; the others have processes of
their own, which wait meanwhile. The eager ones of the same precision always take part: the others
are compared with them, and with eager in float32. What raises an error is left out with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import memory
from contestants import CONTESTANTS
from lanes import Lanes, with_bases
from measurement import Results, Row, arguments, compared, one_of, ratio, table, turns
from workloads import MODELS, WORKLOADS, Workload


def measure(
    workload: Workload, names: Sequence[str], rounds: int, seconds: float, device: str = "cpu"
) -> Row:
    """Medians and spreads of every contestant, compared with eager and with that of its precision.

    Args:
        workload: what they train.
        names: of contestants, eager among them.
        rounds: in which each has a turn.
        seconds: of all turns together, about.
        device: on which they train.
    """
    with Lanes(workload, names, device) as lanes:
        first = {name: lanes.ask("enter", name) for name in names}
        for name in names:
            lanes.ask("settle", name)
        once = lanes.ask("turn", "eager", 1)
        assert once is not None, lanes.skipped["eager"]
        steps = max(1, int(seconds * 1e3 / rounds / len(lanes.names) / once))
        times: dict[str, list[float]] = {name: [] for name in lanes.names}
        for name in turns(lanes.names[:], rounds):
            spent = lanes.ask("turn", name, steps)
            if spent is not None:
                times[name].append(spent / steps)
        ran = {name: lanes.ask("ran", name) for name in lanes.names[:]}
        rows: dict[str, Row] = {name: {"skipped": why} for name, why in lanes.skipped.items()}
    finished = {name: times[name] for name in names if name not in rows}
    for name, row in compared(finished, "eager").items():
        base = times.get(CONTESTANTS[name].base) or times["eager"]
        same = {"ratio_same_precision": ratio(times[name], base), "first_step_s": first[name]}
        rows[name] = row | same | {"ran": ran[name]}
    return {
        "title": workload.title,
        "steps_per_round": steps,
        "contestants": {name: rows[name] for name in names},
    }


def more(row: Row) -> str:
    """The other columns of the table."""
    text = f"{1 / row['ratio_same_precision']:>9.2f}x{row['first_step_s']:>9.2f}s"
    if "peak_bytes" in row:
        text += f"{row['peak_bytes'] / 2**20:>8.0f} MiB"
    return text + (f"  {row['ran']}" if row["ran"] else "")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("workloads", nargs="*", default=[*WORKLOADS], type=one_of(MODELS))
    parser.add_argument("--contestants", nargs="+", type=one_of(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=60.0, help="per workload, about")
    parser.add_argument("--memory", action="store_true", help="peaks, in processes of their own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.memory and options.device != "cpu":
        parser.error("--memory: what is measured is the processor's")
    results = Results("step", options.json, options.device)
    for key in options.workloads:
        workload = MODELS[key]
        known = [n for n, c in CONTESTANTS.items() if c.precision in workload.precisions]
        names = with_bases(options.contestants or known)
        found = measure(workload, names, options.rounds, options.seconds, options.device)
        rows: dict[str, Any] = found["contestants"]
        if options.memory:
            for name in [name for name in names if "skipped" not in rows[name]]:
                rows[name]["peak_bytes"] = memory.peak(key, name)["peak"]
        results.save(workloads={key: found})
        print(table(workload.title, rows, more), flush=True)


if __name__ == "__main__":
    main()
