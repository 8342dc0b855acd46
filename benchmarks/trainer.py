"""ORTTrainer against transformers' Trainer: seconds of whole trainings, captures included.

    python benchmarks/trainer.py [--steps 60 600] [--precisions fp32 bf16] [--engine auto]

Both fine-tune the MiniLM shape, from the same weights, on the same texts of random lengths in
batches of 32, padded to their longest. Each training is a process of its own and as long as the
largest number of steps; what the smaller ones take is read off on the way. Imports and making the
model are not counted.
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


def child(name: str, precision: str, engine: str, *marks: str) -> Row:
    """The seconds from the call of ``train()`` to the ends of these steps."""
    from transformers import TrainerCallback

    import ortrain
    from ortrain import ORTTrainer

    seconds: dict[str, float] = {}

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if str(state.global_step) in marks:
                seconds[str(state.global_step)] = time.perf_counter() - start

    steps = max(map(int, marks))
    settings: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "bf16": precision == "bf16",
        "use_cpu": True,
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
        data = Texts(BATCH * steps)
        trainer = kind(minilm_model(), args, train_dataset=data, data_collator=padded)
        trainer.add_callback(Marks())
        start = time.perf_counter()
        trainer.train()
    report = getattr(trainer, "ort_report", None)
    return {"seconds": seconds, "ran": report.line() if report is not None else ""}


def measure(precision: str, engine: str, marks: list[str], rounds: int) -> dict[str, Row]:
    """Medians of both trainers; ``ratio`` is the median of the second's over the first's."""
    runs: dict[str, list[Row]] = {name: [] for name in TRAINERS}
    for name in turns(TRAINERS, rounds):
        runs[name].append(in_a_process(__file__, name, precision, engine, *marks))
    rows: dict[str, Row] = {}
    for mark in marks:
        seconds = {name: [run["seconds"][mark] for run in each] for name, each in runs.items()}
        rows[mark] = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
        rows[mark]["ratio"] = ratio(seconds["ORTTrainer"], seconds["Trainer"])
        rows[mark]["ran"] = runs["ORTTrainer"][-1]["ran"]
    return rows


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
            rows = measure(precision, options.engine, options.steps, options.rounds)
        except ProcessFailed as failure:
            rows = {"skipped": {"skipped": str(failure)}}
            print(f"{precision}: skipped: {failure}")
        for mark, row in rows.items():
            if "skipped" not in row:
                told = ", ".join(f"{name} {row[f'{name}_s']:.1f} s" for name in TRAINERS)
                print(f"{precision}, {mark} steps: {told}, {row['ratio']:.2f} of it; {row['ran']}")
        results.save(engine=options.engine, precisions={precision: rows})


if __name__ == "__main__":
    main()
