"""``ortrain quantize SRC -o DST --preset …``: weights and products in eight or four bits."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ortrain.cli import golden
from ortrain.cli.arguments import count, names, path, positive, seed, share, whole
from ortrain.cli.output import libraries_to_stderr
from ortrain.cli.progress import Progress
from ortrain.cli.usage import UsageError
from ortrain.extras import require

PRESETS = ("auto", "arm64", "avx2", "avx512", "avx512_vnni", "ppc64le", "tensorrt")
RANGES = ("learnt", "fixed")
LOSSES = ("auto", "labels", "distillation")
METHODS = ("minmax", "entropy", "percentiles")
_RECOVER = (
    "--on-fail recover leaves the most sensitive nodes as they are; the search for them runs the "
    "model once for each node, which can take minutes"
)


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "quantize",
        help="quantize an ONNX model",
        description="Write the ONNX models of a folder in integers of eight or four bits to "
        "another folder. With --validate both are run on examples first, and nothing is written "
        "outside the budgets: then the exit status is 1.",
    )
    add = parser.add_argument
    add("source", type=path, metavar="SRC", help="folder of the model; it stays as it is")
    add("-o", "--output", type=path, required=True, metavar="DST", help="folder to write to")
    add("--preset", choices=PRESETS, help="processor that the model is for (auto: this one)")
    add("--static", action="store_true", help="ranges of activations from --calibrate")
    add("--calibrate", type=path, metavar="FILE", help="examples of which ranges are taken")
    add("--calibration-method", choices=METHODS, default="minmax", help="(%(default)s)")
    add("--percentile", type=positive, default=99.999, metavar="X", help="(%(default)s)")
    add("--weight-only", type=int, choices=(4, 8), metavar="4|8", help="weights alone, in blocks")
    add("--block-size", type=count, default=32, metavar="N", help="of weights (%(default)s)")
    add("--half", choices=("float16", "bfloat16"), help="weights alone, in 16 bits")
    add("--per-tensor", action="store_true", help="one scale a weight instead of one a column")
    add("--exclude", type=names, default=(), metavar="NODE,…", help="nodes that stay as they are")
    add("--file", metavar="NAME", help="ONNX file of SRC (all)")
    add("--suffix", default="quantized", metavar="TEXT", help="of the files (%(default)s)")
    add(
        "--validate",
        type=path,
        metavar="FILE",
        help="examples: .csv, .tsv, .jsonl or .npz (those of --calibrate, where there are budgets)",
    )
    add(
        "--on-fail",
        choices=("refuse", "recover"),
        default="refuse",
        help="recover: leave the most sensitive nodes as they are until the budgets are kept, then "
        "train the weights on --train",
    )
    add("--max-excluded", type=whole, metavar="N", help="nodes that may stay as they are (all)")
    group = parser.add_argument_group("training for the quantization, with --on-fail recover")
    add = group.add_argument
    add("--train", type=path, metavar="FILE", help="examples to train on, none of --validate")
    add("--train-steps", type=count, default=200, metavar="N", help="batches (%(default)s)")
    add("--learning-rate", type=positive, default=5e-5, metavar="X", help="(%(default)s)")
    add("--seed", type=seed, default=0, metavar="N", help="of the batches' order (%(default)s)")
    add("--train-loss", choices=LOSSES, default="auto", help="what is learnt (%(default)s)")
    add("--train-ranges", choices=RANGES, default="learnt", help="of roundings (%(default)s)")
    add(
        "--distillation",
        type=share,
        default=0.5,
        metavar="X",
        help="how much the original's answers count beside labels, 0 to 1 (%(default)s)",
    )
    add("--stop-early", action="store_true", help="end when the budgets hold on some of --train")
    golden.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Quantize as the options say; returns the exit status."""
    require("onnx", "ortrain quantize")
    examples = _examples(options)
    from ortrain.deploy.progress import shown

    with libraries_to_stderr(), golden.told_in_one_line(), shown():
        remedy = "" if options.half or options.on_fail != "refuse" else _RECOVER
        report, sensitive = golden.gated(lambda: _quantize(options, examples), options, remedy)
    return golden.finish(report, options, sensitive)


def tools() -> Any:
    """The module of ``ORTQuantizer`` and its configurations; tests put another in its place."""
    from ortrain.deploy import quantization

    return quantization


def _examples(options: argparse.Namespace) -> Path | None:
    """The file to compare on.

    Raises:
        UsageError: options do not go together.
    """
    ways = {
        "--preset": options.preset,
        "--weight-only": options.weight_only,
        "--half": options.half,
    }
    given = [name for name, value in ways.items() if value]
    if not given:
        raise UsageError("--preset: is missing; give one, as --preset auto, or --weight-only 4")
    if len(given) > 1:
        raise UsageError(f"{given[1]}: is a way of its own; leave {given[0]} out")
    if options.static and not options.preset:
        raise UsageError(f"--static: is of --preset; leave it out, or {given[0]}")
    if options.static and options.calibrate is None:
        raise UsageError("--static: needs examples; give them with --calibrate")
    if options.calibrate is not None and not options.static:
        raise UsageError("--calibrate: ranges are taken with --static alone; give both")
    if options.on_fail != "recover":
        for name in ("train", "max_excluded"):
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: is of a recovery; give --on-fail recover"
                )
    if options.train is not None and not options.preset:
        raise UsageError(
            f"--train: weights are trained for eight bits; leave it out, or {given[0]}"
        )
    if options.percentile > 100:
        raise UsageError(f"--percentile: {options.percentile:g} is more than 100")
    examples = options.validate or options.calibrate
    if None not in (options.train, examples) and _same_file(options.train, examples):
        raise UsageError(
            f"--train: {options.train} is what the result is judged on; give other examples"
        )
    if options.validate is not None:
        return Path(options.validate)
    if not options.budget and options.on_fail == "refuse":
        return None
    if options.calibrate is None:
        asked = "--budget" if options.budget else "--on-fail recover"
        raise UsageError(f"{asked}: there is nothing to compare on; give examples with --validate")
    print(f"comparing on {options.calibrate}, which also calibrates", file=sys.stderr)
    return Path(options.calibrate)


def _same_file(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _quantize(options: argparse.Namespace, examples: Path | None) -> None:
    tool = tools()
    quantizer = tool.ORTQuantizer.from_pretrained(options.source, file_name=options.file)
    given = golden.given(options, examples)
    if options.on_fail == "recover":
        given["on_fail"] = "recover"
        if options.max_excluded is not None:
            given["max_excluded"] = options.max_excluded
        if options.train is not None:
            given["training_data"] = golden.golden_set(options, options.train, options.source)
            given["fine_tuning"] = tool.FineTuning(
                steps=options.train_steps,
                learning_rate=options.learning_rate,
                seed=options.seed,
                loss=options.train_loss,
                ranges=options.train_ranges,
                distillation=options.distillation,
                stop_early=options.stop_early,
            )
    if options.weight_only:
        configuration = tool.WeightOnlyConfig(
            bits=options.weight_only,
            block_size=options.block_size,
            nodes_to_exclude=list(options.exclude),
        )
    elif options.half:
        configuration = tool.HalfPrecisionConfig(
            dtype=options.half, nodes_to_exclude=list(options.exclude)
        )
    else:
        configuration = _configuration(tool, options)
        if options.static:
            given["calibration_tensors_range"] = _ranges(tool, quantizer, configuration, options)
    progress = Progress(sys.stderr, options.train_steps)
    if "fine_tuning" in given:
        given["on_step"] = progress.update
    try:
        quantizer.quantize(configuration, options.output, file_suffix=options.suffix, **given)
    finally:
        progress.close()


def _configuration(tool: Any, options: argparse.Namespace) -> Any:
    preset = getattr(tool.AutoQuantizationConfig, options.preset)
    given: dict[str, Any] = {"per_channel": not options.per_tensor}
    if options.exclude:
        given["nodes_to_exclude"] = list(options.exclude)
    if options.preset == "tensorrt":
        if not options.static:
            raise UsageError("--preset tensorrt: is static; give --static and --calibrate")
        return preset(**given)
    return preset(is_static=options.static, **given)


def _ranges(tool: Any, quantizer: Any, configuration: Any, options: argparse.Namespace) -> Any:
    batches = golden.golden_set(options, options.calibrate, options.source).batches
    further = (
        {"percentile": options.percentile} if "percentiles" in options.calibration_method else {}
    )
    method = getattr(tool.AutoCalibrationConfig, options.calibration_method)
    return quantizer.fit(
        batches,
        method(batches, **further),
        operators_to_quantize=configuration.operators_to_quantize,
    )
