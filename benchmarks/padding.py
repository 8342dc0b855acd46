"""A training on sentences with their padding and without: what that takes, and that losses stay.

    python benchmarks/padding.py [--data train.tsv] [--model DIR] [--steps N]

MiniLM's shape learns to classify sentences in batches of 32, with dropout and AdamW: eager, ortrain
that computes all padding (`skip_padding=False`) and ortrain. They take turns of ten batches, from
the same weights on the same batches, which are padded to their longest sentence or to 128 words.

Then is compared what the two of ortrain compute. Of each step: the losses at the same weights, with
the same dropout masks, and those of the two trainings, which go their own ways from the first
rounding on. After as many steps without dropout: the answers to sentences that were held out.

The data has the columns sentence and label, as SST-2 has, of which the last tenth is held out.
Without any, sentences of random words are drawn, as long as SST-2's.
"""

from __future__ import annotations

import argparse
import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import workloads
from contestants import CONTESTANTS, Training
from loss_curve import pretrained
from measurement import Results, Row, arguments, compared, one_of, ratio, reason, table, turns
from workloads import Batch, Workload

from ortrain.cli.text_classification.examples import read_examples
from ortrain.step.report import alone

CONTESTS = {
    "fp32": ("eager", "aten-whole", "aten"),
    "bf16": ("eager-bf16", "aten-whole-bf16", "aten-bf16"),
}
PADDINGS = {"longest": 0, "128": 128}
BATCH, TURN, SENTENCES = 32, 10, 6920
# Word pieces of SST-2's sentences, [CLS] and [SEP] among them: each twentieth has up to so many.
QUANTILES = (
    3, 8, 10, 12, 13, 15, 17, 18, 19, 21, 22, 24, 25, 27, 29, 31, 33, 35, 38, 43, 67
)  # fmt: skip


@dataclass(frozen=True)
class Sentence:
    """The numbers of its word pieces, and its label."""

    ids: list[int]
    label: int


def drawn(number: int) -> list[Sentence]:
    """Sentences of random words, always the same; a label tells what most of the words are."""
    dice = random.Random(0)
    found = []
    for _ in range(number):
        twentieth = dice.random() * (len(QUANTILES) - 1)
        low, high = QUANTILES[int(twentieth)], QUANTILES[int(twentieth) + 1]
        length = round(low + (high - low) * (twentieth % 1))
        words = [dice.randrange(1000, 30522) for _ in range(length - 2)]
        label = int(2 * sum(word % 2 for word in words) > len(words))
        found.append(Sentence([101, *words, 102], label))
    return found


def read(data: Path, model: str) -> list[Sentence]:
    """The sentences of a file, in the word pieces of a model's tokenizer, 128 at most."""
    from transformers import AutoTokenizer

    examples = read_examples(data, text_column="sentence", label_column="label")
    labels = sorted({example.label for example in examples})
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [example.text for example in examples]
    encoded = tokenizer(texts, truncation=True, max_length=128)["input_ids"]
    return [
        Sentence(ids, bisect.bisect_left(labels, example.label))
        for ids, example in zip(encoded, examples, strict=True)
    ]


def batches(sentences: Sequence[Sentence], length: int) -> list[Batch]:
    """All of them in order, in batches that are so long; 0 is as long as the longest of each."""
    found = []
    for start in range(0, len(sentences), BATCH):
        some = sentences[start : start + BATCH]
        size = length or max(len(each.ids) for each in some)
        ids = torch.tensor([each.ids + [0] * (size - len(each.ids)) for each in some])
        lengths = torch.tensor([[len(each.ids)] for each in some])
        found.append(
            {
                "input_ids": ids,
                "attention_mask": (torch.arange(size) < lengths).long(),
                "labels": torch.tensor([each.label for each in some]),
            }
        )
    return found


def classifier(folder: str | None, dropout: bool = True) -> torch.nn.Module:
    """MiniLM's shape with random weights, or a pretrained model from a folder, with a new head."""
    if folder is None:
        module = workloads.minilm_model()
    else:
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(0)
        module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout) and not dropout:
            layer.p = 0.0
    return module.train()


class Recorded(Training):
    """A training that keeps its losses, and draws the dropout of a step by the step's number."""

    def begin(self) -> None:
        """Starts again, from the weights that it had."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.start, strict=True):
                parameter.copy_(value)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=5e-5, fused=True)
        self.steps, self.losses = 0, list[torch.Tensor]()

    def wrap(self, **more: Any) -> None:
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        super().wrap(**more)
        self.begin()

    def step(self) -> None:
        torch.manual_seed(self.steps)
        batch = self.batches[self.steps % len(self.batches)]
        loss = self.contestant.loss(self.model, batch, self.device)
        loss.backward()
        self.losses.append(loss.detach())
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def timed(names: Sequence[str], workload: Workload, steps: int) -> dict[str, Row]:
    """A row for each contestant, with what it has left out; eager, then ours without and with."""
    trainings = {name: Recorded(name, workload) for name in names}
    for training in trainings.values():
        training.wrap()
        training.settle()
        training.begin()
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in turns(names, -(-steps // TURN)):
        size = min(TURN, steps - trainings[name].steps)
        times[name].append(trainings[name].turn(size, warm_up=0) / size)
    eager, whole, ours = names
    rows = compared(times, eager)
    for name, row in rows.items():
        report = trainings[name].report
        row["total_s"] = _seconds(times[name], steps)
        if report is not None:
            row["left_out"], row["densities"] = report.left_out_share, dict(report.densities)
    rows[ours]["ratio_whole"] = ratio(times[ours], times[whole])
    apart = differences(trainings[whole].losses, trainings[ours].losses)
    rows[ours]["losses_apart"] = {"first": apart[0], "largest": max(apart)}
    return rows


def _seconds(times: Sequence[float], steps: int) -> float:
    sizes = [min(TURN, steps - start) for start in range(0, steps, TURN)]
    return sum(ms * size for ms, size in zip(times, sizes, strict=True)) / 1e3


def differences(ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[float]:
    """Of each pair of losses, relative."""
    pairs = zip(ours, others, strict=True)
    return [float((a.double() - b.double()).abs() / b.double().abs()) for a, b in pairs]


def losses_at_the_same_weights(names: Sequence[str], workload: Workload, steps: int) -> list[float]:
    """How far the losses of each step are apart, whose weights are those of one training."""
    _, whole, ours = names
    training = Recorded(ours, workload)
    other = CONTESTANTS[whole]
    model = other.wrap(training.model)
    training.wrap()
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        losses.append(other.loss(model, training.batches[step % len(training.batches)]).detach())
        training.step()
    return differences(training.losses, losses)


def answers(names: Sequence[str], workload: Workload, held_out: list[Batch], steps: int) -> Row:
    """How many sentences two trainings without dropout answer otherwise, each by its own graph."""
    logits = []
    for name in names[1:]:
        training = Recorded(name, workload)
        training.wrap()
        for _ in range(steps):
            training.step()
        training.model.eval()
        narrow = torch.autocast("cpu", torch.bfloat16, enabled=training.contestant.autocast)
        with torch.no_grad(), narrow:
            found = [training.model(**batch).logits.float() for batch in held_out]
        logits.append(torch.cat(found))
    whole, ours = logits
    return {
        "sentences": len(whole),
        "other_answers": int((whole.argmax(-1) != ours.argmax(-1)).sum()),
        "logits_apart": float((whole - ours).abs().max()),
    }


def measure(
    names: Sequence[str],
    workload: Workload,
    quiet: Workload,
    held_out: list[Batch],
    steps: int,
    checked: int,
) -> Row:
    """All of one precision and one padding.

    Args:
        names: of the contestants.
        workload: what is trained.
        quiet: the same without dropout.
        held_out: batches that are not trained on.
        steps: that are timed.
        checked: that are compared.
    """
    row: Row = {"contestants": timed(names, workload, steps)}
    if checked:
        apart = losses_at_the_same_weights(names, workload, checked)
        row["losses"] = {"steps": checked, "largest": max(apart)}
        row["answers"] = answers(names, quiet, held_out, checked)
    return row


def more(row: Row) -> str:
    """The other columns of the table."""
    told = f"{row['total_s']:>9.1f} s"
    if row.get("left_out"):
        parts = (f"{density:.0%} {words}" for words, density in alone(row["densities"]).items())
        told += f"  {row['left_out']:.0%} left out ({', '.join(parts)})"
    if "ratio_whole" in row:
        told += f", {1 / row['ratio_whole']:.2f}x of all padding computed"
    return told


def exactness(row: Row) -> str:
    """What is compared, in three lines."""
    losses, told = row["losses"], row["answers"]
    *_, ours = row["contestants"].values()
    return (
        f"  losses of two trainings: {ours['losses_apart']['first']:.1e} apart in the first step, "
        f"{ours['losses_apart']['largest']:.1e} at most\n"
        f"  losses at the same weights: {losses['largest']:.1e} apart at most, relative, in "
        f"{losses['steps']} steps\n"
        f"  without dropout: {told['other_answers']} of {told['sentences']} held-out sentences "
        f"answered otherwise, logits {told['logits_apart']:.1e} apart at most"
    )


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--data", type=Path, help="a .tsv with the columns sentence and label")
    parser.add_argument("--model", help="a folder of a pretrained model; random weights without it")
    parser.add_argument("--steps", type=int, help="that are timed; an epoch without it")
    parser.add_argument("--checked", type=int, default=50, help="that are compared (%(default)s)")
    parser.add_argument("--paddings", nargs="+", default=[*PADDINGS], type=one_of(PADDINGS))
    parser.add_argument("--precisions", nargs="+", default=[*CONTESTS], type=one_of(CONTESTS))
    return parser.parse_args()


def main() -> None:
    options = parse()
    sentences = (
        drawn(SENTENCES)
        if options.data is None
        else read(options.data, options.model or pretrained())
    )
    cut = len(sentences) - max(1, len(sentences) // 10)
    training, held_out = sentences[:cut], sentences[cut:]
    random.Random(0).shuffle(training)
    results = Results("padding", options.json)
    for padding in options.paddings:
        length = PADDINGS[padding]
        given = batches(training, length)
        steps = options.steps or len(given)
        title = f"MiniLM-L6 shape, sentences of SST-2's lengths in batches of {BATCH}, " + (
            f"padded to {length}" if length else "padded to their longest"
        )
        make = partial(_made, options.model, True, given)
        workload = Workload(title=title, make=make)
        quiet = replace(workload, make=partial(_made, options.model, False, given))
        for precision in options.precisions:
            names = CONTESTS[precision]
            try:
                checks = batches(held_out, length), steps, options.checked
                row = measure(names, workload, quiet, *checks)
            except Exception as error:
                print(f"{title}, {precision}: skipped: {reason(error)}")
                continue
            print(table(f"{title}, {precision}, {steps} steps", row["contestants"], more))
            if "losses" in row:
                print(exactness(row))
            row |= {"steps": steps, "data": options.data.name if options.data else "drawn"}
            results.save(settings={f"{title}, {precision}": row})


def _made(folder: str | None, dropout: bool, given: list[Batch]) -> workloads.Made:
    return classifier(folder, dropout), given


if __name__ == "__main__":
    main()
