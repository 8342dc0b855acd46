"""Seconds of whole runs of 5 to 200 steps, with all that comes before the first one is fast.

    python benchmarks/whole_runs.py [bert minilm gpt2 resnet mlp] [--contestants eager aten auto]

Each contestant trains in a process of its own. The time begins before ortrain is imported and the
module is wrapped, which is told as 0 steps, and holds tracing, building, comparing and timing.
Nobody tells how many steps are to come (`--told` does), so that one run of 200 steps has those of
5 in it. A graph has taken over at the step from which on nine calls in ten are its own.
Beside each time stands its ratio to eager's of the same round; the largest is the worst loss.
"""

from __future__ import annotations

import json
import statistics
import time

from measurement import ProcessFailed, Results, Row, arguments, in_a_process, one_of, ratio, turns

STEPS = (5, 10, 30, 60, 200)
MODELS = ("bert", "minilm", "gpt2", "resnet", "mlp")
NAMES = ("eager", "aten", "auto")


def child(workload: str, name: str, told: str) -> Row:
    from contestants import Training, taken_over
    from workloads import WORKLOADS

    training = Training(name, WORKLOADS[workload])
    start = time.perf_counter()
    training.wrap()
    if training.report is not None:
        training.model.steps_to_come = int(told) if told else None
    last = int(told) if told else max(STEPS)
    seconds: dict[str, float] = {"0": time.perf_counter() - start}
    graphs: list[int] = []
    with training.contestant.settings():
        for step in range(1, last + 1):
            training.step()
            if step in STEPS:
                seconds[str(step)] = time.perf_counter() - start
            graphs.append(0 if training.report is None else training.report.graph_calls)
    return {
        "seconds": seconds,
        "graph_calls": graphs[-1],
        "takes_over_at": taken_over(graphs),
        "ran": training.ran(),
    }


def compared(runs: dict[str, list[Row]]) -> dict[str, Row]:
    """Medians of seconds, and of what they are of eager's in the same round, by step."""
    rows: dict[str, Row] = {}
    for name, found in runs.items():
        times = {step: [run["seconds"][step] for run in found] for step in found[0]["seconds"]}
        eager = {step: [run["seconds"][step] for run in runs["eager"]] for step in times}
        rows[name] = {
            "seconds": {step: statistics.median(values) for step, values in times.items()},
            "ratio": {step: ratio(times[step], eager[step]) for step in times if step != "0"},
            "graph_calls": found[-1]["graph_calls"],
            "takes_over_at": found[-1]["takes_over_at"],
            "ran": found[-1]["ran"],
        }
    return rows


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("workloads", nargs="*", default=[*MODELS], type=one_of(MODELS))
    parser.add_argument("--contestants", nargs="+", default=[*NAMES])
    parser.add_argument("--told", type=int, choices=STEPS, help="the steps to come")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    results = Results("whole_runs", options.json)
    told = str(options.told or "")
    for workload in options.workloads:
        runs: dict[str, list[Row]] = {name: [] for name in options.contestants}
        try:
            for name in turns(options.contestants, options.rounds):
                runs[name].append(in_a_process(__file__, workload, name, told))
        except ProcessFailed as failure:
            print(f"{workload}, {name}: {failure}")
            continue
        rows = compared(runs)
        print(f"{workload}{f', told {told}' if told else ''}")
        for name, row in rows.items():
            times = ", ".join(
                f"{step}: {row['seconds'][step]:.1f} s ({ratio:.2f})"
                for step, ratio in row["ratio"].items()
            )
            ran = f"{row['graph_calls']} as a graph, from {row['takes_over_at']} on; {row['ran']}"
            print(f"  {name:<10}0: {row['seconds']['0']:.1f} s, {times}; {ran}", flush=True)
        results.save(**{f"told_{told}" if told else "workloads": {workload: rows}})


if __name__ == "__main__":
    main()
