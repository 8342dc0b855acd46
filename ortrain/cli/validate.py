"""``ortrain validate A B --data FILE``: compare two ONNX models on the same examples."""

from __future__ import annotations

import argparse
from typing import Any

from ortrain.cli import golden
from ortrain.cli.arguments import count, path, probability, whole
from ortrain.cli.output import libraries_to_stderr
from ortrain.extras import require


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "validate",
        help="compare two ONNX models on the same examples",
        description="Run both models on the examples of a file, compare outputs and predictions "
        "overall, by class and by slice, and hold them to budgets. The exit status is 0 inside "
        "the budgets, 1 outside, and 2 where something cannot be compared.",
    )
    add = parser.add_argument
    add("before", type=path, metavar="A", help="the model before: a folder, or an .onnx file")
    add("after", type=path, metavar="B", help="the model after")
    add("--data", type=path, required=True, metavar="FILE", help=".csv, .tsv, .jsonl or .npz")
    add("--provider", default="CPUExecutionProvider", metavar="NAME", help="(%(default)s)")
    add("--threads", type=count, metavar="N", help="of a model (as onnxruntime takes)")
    add("--latency-runs", type=whole, default=20, metavar="N", help="0: none (%(default)s)")
    add("--no-memory", dest="memory", action="store_false", help="do not measure the peak")
    add(
        "--threshold",
        type=probability,
        action="append",
        metavar="P",
        help="probability at which decisions are compared; may be repeated (0.5)",
    )
    golden.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare as the options say; returns the exit status."""
    require("onnx", "ortrain validate")
    from ortrain.deploy.progress import shown

    with libraries_to_stderr(), golden.told_in_one_line(), shown():
        from ortrain.deploy.equivalence.comparison import compare

        budgets = golden.budgets_of(options)
        report = compare(
            options.before,
            options.after,
            golden.golden_set(options, options.data, options.before),
            budgets,
            provider=options.provider,
            threads=options.threads,
            latency_runs=options.latency_runs,
            memory=options.memory,
            thresholds=options.threshold or (0.5,),
        )
    return golden.finish(report, options)
