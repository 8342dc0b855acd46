"""ORTTrainer against transformers' Trainer: seconds of whole trainings, captures included.

    python benchmarks/trainer.py [--steps 60 600] [--precisions fp32 bf16] [--engine auto]

Both fine-tune the MiniLM shape, from the same weights, on the same texts of random lengths in
batches of 32, padded to their longest. Each training is a process of its own, the short one too:
ORTTrainer knows how many steps are to come. Imports and making the model are not counted.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from typing import Any

import torch
from measurement import ProcessFailed, Results, Row, arguments, in_a_process, one_of, ratio, turns
from workloads import Batch, minilm_model

BATCH, SHORTEST, LONGEST = 32, 16, 48
TRAINERS = ("Trainer", "ORTTrainer")
PRECISIONS = ("fp32", "bf16")


class Texts(torch.utils.data.Dataset[Batch]):
    """Random token ids of random lengths and their labels; every number gives the same text."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Batch:
        dice = torch.Generator().manual_seed(number)
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=dice))
        ids = torch.randint(1000, 30522, (length,), generator=dice)
        return {"input_ids": ids, "labels": ids[0] % 2}


def padded(texts: list[Batch]) -> Batch:
    """A batch as long as its longest text."""
    ids = torch.nn.utils.rnn.pad_sequence([text["input_ids"] for text in texts], batch_first=True)
    labels = torch.stack([text["labels"] for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def child(name: str, precision: str, engine: str, steps: str, device: str = "cpu") -> Row:
    """The seconds of ``train()`` for so many steps."""
    import ortrain
    from ortrain import ORTTrainer

    settings: dict[str, Any] = {
        "max_steps": int(steps),
        "per_device_train_batch_size": BATCH,
        "bf16": precision == "bf16",
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": False,
        "optim": "adamw_torch_fused",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        if name == "Trainer":
            import transformers

            kind: Any = transformers.Trainer
            args: Any = transformers.TrainingArguments(folder, **settings)
        else:
            kind = ORTTrainer
            args = ortrain.ORTTrainingArguments(folder, ort_engine=engine, **settings)
        data = Texts(BATCH * int(steps))
        trainer = kind(minilm_model(), args, train_dataset=data, data_collator=padded)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    report = getattr(trainer, "ort_report", None)
    return {"seconds": seconds, "ran": report.line() if report is not None else ""}


def measure(precision: str, engine: str, steps: str, rounds: int) -> Row:
    """Medians of both trainers; ``ratio`` is the median of the second's over the first's."""
    runs: dict[str, list[Row]] = {name: [] for name in TRAINERS}
    for name in turns(TRAINERS, rounds):
        runs[name].append(in_a_process(__file__, name, precision, engine, steps))
    seconds = {name: [run["seconds"] for run in each] for name, each in runs.items()}
    row: Row = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    row["ratio"] = ratio(seconds["ORTTrainer"], seconds["Trainer"])
    row["ran"] = runs["ORTTrainer"][-1]["ran"]
    return row


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--steps", nargs="+", default=["60", "600"], metavar="N")
    parser.add_argument("--precisions", nargs="+", default=[*PRECISIONS], type=one_of(PRECISIONS))
    parser.add_argument("--engine", default="auto", help="of ORTTrainer (%(default)s)")
    parser.add_argument("--child", nargs="+")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    results = Results("trainer", options.json)
    for precision in options.precisions:
        try:
            rows = {
                steps: measure(precision, options.engine, steps, options.rounds)
                for steps in options.steps
            }
        except ProcessFailed as failure:
            rows = {"skipped": {"skipped": str(failure)}}
            print(f"{precision}: skipped: {failure}")
        for steps, row in rows.items():
            if "skipped" not in row:
                told = ", ".join(f"{name} {row[f'{name}_s']:.1f} s" for name in TRAINERS)
                print(f"{precision}, {steps} steps: {told}, {row['ratio']:.2f} of it; {row['ran']}")
        results.save(engine=options.engine, precisions={precision: rows})


if __name__ == "__main__":
    main()
