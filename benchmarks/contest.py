"""What it costs to find the fastest engine, of a run of 200 steps, and when a graph takes over.

    python benchmarks/contest.py [bert minilm …] [--steps 200] [--told]

Each run is a process of its own, with ortrain's default options. In its cost are captures, building
and certificates of all engines, and what the steps of those that lost took longer than the
winner's; in the run are all steps with their optimizer, eager's first ones too. A graph has taken
over at the step from which on nine calls in ten are its own.
"""

from __future__ import annotations

import json
import time

from measurement import ProcessFailed, Results, Row, arguments, in_a_process, one_of
from workloads import WORKLOADS

NAMES = ("auto", "auto-bf16")
STEPS = 200


def child(workload: str, name: str, steps: int, told: bool) -> Row:
    from contestants import Training, taken_over

    training = Training(name, WORKLOADS[workload])
    training.wrap()
    training.model.steps_to_come = steps if told else None
    graphs: list[int] = []
    start = time.perf_counter()
    for _ in range(steps):
        training.step()
        graphs.append(training.report.graph_calls)
    seconds = time.perf_counter() - start
    contest = training.report.contest
    cost = 0.0 if contest is None else contest.cost
    return {
        "seconds": seconds,
        "cost": cost,
        "share": cost / seconds,
        "speedup": None if contest is None else contest.speedup,
        "takes_over_at": taken_over(graphs),
        "found": str(contest),
    }


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("workloads", nargs="*", default=["bert", "minilm"], type=one_of(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", default=[*NAMES], type=one_of(NAMES))
    parser.add_argument("--steps", type=int, default=STEPS, help="(%(default)s)")
    parser.add_argument("--told", action="store_true", help="how many steps are to come")
    parser.add_argument("--child", nargs=4)
    options = parser.parse_args()
    if options.child:
        workload, name, steps, told = options.child
        print(json.dumps(child(workload, name, int(steps), bool(told))))
        return
    results = Results("contest", options.json)
    for workload in options.workloads:
        rows: dict[str, Row] = {}
        for name in options.contestants:
            told = "told" if options.told else ""
            try:
                row = in_a_process(__file__, workload, name, str(options.steps), told)
            except ProcessFailed as failure:
                rows[name] = {"skipped": str(failure)}
                print(f"{workload}, {name}: skipped: {failure}")
                continue
            rows[name] = row
            print(
                f"{workload}, {name}: {row['cost']:.1f} s of {row['seconds']:.1f}, "
                f"{row['share']:.1%}; a graph from step {row['takes_over_at']}; {row['found']}",
                flush=True,
            )
        usual = options.steps == STEPS and not options.told
        key = f"{options.steps}_steps{'_told' if options.told else ''}"
        results.save(**{"workloads" if usual else key: {workload: rows}})


if __name__ == "__main__":
    main()
