"""``ortrain optimize SRC -o DST -O2``: fuse what onnxruntime has faster kernels for."""

from __future__ import annotations

import argparse
from typing import Any

from ortrain.cli import golden
from ortrain.cli.arguments import path
from ortrain.cli.output import libraries_to_stderr
from ortrain.cli.usage import UsageError
from ortrain.extras import require

LEVELS = {
    "1": "what onnxruntime does by itself",
    "2": "also fused attention and normalizations",
    "3": "also an approximation of GELU",
    "4": "also float16, for GPUs",
}


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "optimize",
        help="fuse the operators of an ONNX model",
        description="Write the ONNX models of a folder with fused operators to another folder. "
        "With --validate both are run on examples first, and nothing is written outside the "
        "budgets: then the exit status is 1.",
    )
    add = parser.add_argument
    add("source", type=path, metavar="SRC", help="folder of the model; it stays as it is")
    add("-o", "--output", type=path, required=True, metavar="DST", help="folder to write to")
    told = "; ".join(f"{level}: {text}" for level, text in LEVELS.items())
    add("-O", dest="level", choices=LEVELS, required=True, help=f"how much, as -O2 ({told})")
    add("--file", action="append", metavar="NAME", help="ONNX file of SRC; may be repeated (all)")
    add("--suffix", default="optimized", metavar="TEXT", help="of the files (%(default)s)")
    add("--validate", type=path, metavar="FILE", help="examples: .csv, .tsv, .jsonl or .npz")
    golden.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Optimize as the options say; returns the exit status."""
    require("onnx", "ortrain optimize")
    if options.budget and options.validate is None:
        raise UsageError("--budget: there is nothing to compare on; give examples with --validate")
    from ortrain.deploy.progress import shown

    with libraries_to_stderr(), golden.told_in_one_line(), shown():
        report, sensitive = golden.gated(lambda: _optimize(options), options)
    return golden.finish(report, options, sensitive)


def tools() -> tuple[Any, Any]:
    """``ORTOptimizer`` and ``AutoOptimizationConfig``; tests put others in their place."""
    from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer

    return ORTOptimizer, AutoOptimizationConfig


def _optimize(options: argparse.Namespace) -> None:
    optimizer_class, levels = tools()
    optimizer = optimizer_class.from_pretrained(options.source, file_names=options.file)
    optimizer.optimize(
        getattr(levels, f"O{options.level}")(),
        options.output,
        file_suffix=options.suffix,
        **golden.given(options, options.validate),
    )
