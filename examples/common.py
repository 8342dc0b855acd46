"""What the examples share: arguments, data, a tokenizer, and the comparison of the engines.

An example makes an ``ORTTrainer`` as any script makes a ``Trainer``; `compare` trains once with
each engine and prints what came out.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import datasets
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from ortrain import ORTSeq2SeqTrainer, ORTTrainer, ORTTrainingArguments

ENGINES = ("both", "torch", "onnxruntime", "aten", "auto")
TRAIN_SAMPLES, EVAL_SAMPLES = 4096, 512
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Steps that are timed apart: the first one captures and compiles, the next ones fill memory pools.
FIRST_STEPS = 5


@dataclass
class ExampleArguments:
    """What every example takes besides the training arguments."""

    engine: str = field(
        default="both",
        metadata={
            "help": "torch, onnxruntime, aten or auto; both is torch, then onnxruntime, or aten "
            "where the training is in 16 bits."
        },
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder of a model to train on; a new one without it."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes of a new model: num_hidden_layers=4,…"}
    )
    train_file: str | None = field(
        default=None, metadata={"help": ".json (one row a line), .csv or .parquet; see rows()."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "The same; without it a tenth of the training file."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": f"Rows to take, or to make (else {TRAIN_SAMPLES})."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": f"Rows to take, or to make (else {EVAL_SAMPLES})."}
    )
    json_file: str | None = field(default=None, metadata={"help": "Write the figures there."})


A = TypeVar("A", bound=ExampleArguments)
T = TypeVar("T", bound=ORTTrainingArguments)


def parse(arguments: type[A], training: type[T], **defaults: Any) -> tuple[A, T]:
    """Reads the command line.

    Args:
        arguments: the example's own.
        training: the training arguments.
        defaults: of training arguments, where they differ from transformers' and those below.
    """
    kinds: Any = [arguments, training]
    parser = HfArgumentParser(kinds)
    parser.set_defaults(
        output_dir=f"outputs/{Path(sys.argv[0]).stem}",
        ort_fallback="raise",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        logging_steps=50,
        warmup_steps=20,
        per_device_eval_batch_size=64,
    )
    parser.set_defaults(**defaults)
    own, of_training = parser.parse_args_into_dataclasses()
    if own.engine not in ENGINES:
        parser.error(f"--engine {own.engine}: expected one of {', '.join(ENGINES)}")
    if of_training.ort_engine != "auto":
        parser.error(f"say --engine {of_training.ort_engine} in place of --ort_engine")
    if of_training.disable_tqdm:
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    return own, of_training


def load(arguments: ExampleArguments, rows: Callable[[int, int], Dataset]) -> list[Dataset]:
    """The rows to train on and those to evaluate on.

    Args:
        arguments: name the files.
        rows: makes so many synthetic rows, of a seed.
    """
    most = (arguments.max_train_samples, arguments.max_eval_samples)
    if arguments.train_file is None:
        return [rows(most[0] or TRAIN_SAMPLES, 0), rows(most[1] or EVAL_SAMPLES, 1)]
    train = _read(arguments.train_file)
    if arguments.validation_file is not None:
        parts = [train, _read(arguments.validation_file)]
    else:
        parts = [*train.train_test_split(test_size=0.1, seed=0).values()]
    limits = [min(limit or len(part), len(part)) for limit, part in zip(most, parts, strict=True)]
    return [part.select(range(limit)) for limit, part in zip(limits, parts, strict=True)]


def _read(file: str) -> Dataset:
    readers = {".json": Dataset.from_json, ".csv": Dataset.from_csv}
    readers[".parquet"] = Dataset.from_parquet
    suffix = Path(file).suffix
    if suffix not in readers:
        raise SystemExit(f"{file}: expected a name that ends with {', '.join(readers)}")
    return readers[suffix](file)


def words(count: int) -> list[str]:
    """So many different words, always the same."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    every = ["".join(parts) for parts in itertools.product(syllables, repeat=2)]
    return random.Random(0).sample(every, count)


def sentences(count: int, seed: int) -> Dataset:
    """Texts of a language in which each word is followed by one of four."""
    dice, grammar = random.Random(seed), random.Random(0)
    known = words(200)
    following = {word: grammar.sample(known, 4) for word in known}
    texts = []
    for _ in range(count):
        text = [dice.choice(known)]
        for _ in range(dice.randint(63, 93)):
            text += dice.choices(following[text[-1]], [0.5, 0.25, 0.15, 0.1])
        texts.append(" ".join(text))
    return Dataset.from_dict({"text": texts})


def tokenizer_of(arguments: ExampleArguments, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """The model's tokenizer; of a new model one that knows the words of the texts."""
    if arguments.model_name_or_path is not None:
        return AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    known = [*SPECIAL_TOKENS, *sorted({word for text in texts for word in text.split()})]
    ids = {word: i for i, word in enumerate(known)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, SPECIAL_TOKENS, strict=True))
    )


def model_of(kind: Any, config: PreTrainedConfig, arguments: ExampleArguments) -> PreTrainedModel:
    """The model of the folder named, or a new one.

    Args:
        kind: one of the Auto classes of transformers.
        config: of a new model.
        arguments: name the folder, and changes of the config.
    """
    if arguments.model_name_or_path is not None:
        return kind.from_pretrained(arguments.model_name_or_path)
    if arguments.config_overrides is not None:
        config.update_from_string(arguments.config_overrides)
    return kind.from_config(config)


class Stopwatch(TrainerCallback):
    """Seconds of each step: forward, backward and optimizer, without reading data or logging."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.steps.append(time.perf_counter() - self.start)


def compare(
    trainer: Callable[[T], ORTTrainer | ORTSeq2SeqTrainer],
    arguments: ExampleArguments,
    training: T,
    metric: str,
) -> None:
    """Trains and evaluates with each engine asked for, and prints a table.

    Args:
        trainer: makes a trainer; with ``model_init=``, so that all engines get the same weights.
        arguments: the example's own.
        training: the training arguments.
        metric: what to compare, a key of what ``evaluate()`` returns.
    """
    ours = "aten" if training.bf16 or training.fp16 else "onnxruntime"
    engines = ["torch", ours] if arguments.engine == "both" else [arguments.engine]
    runs = []
    for engine in engines:
        args = copy.copy(training)
        args.ort_engine, args.output_dir = engine, f"{training.output_dir}/{engine}"
        runs.append(train(trainer(args), engine, metric))
    print(table(runs, metric))
    if arguments.json_file is not None:
        Path(arguments.json_file).write_text(json.dumps(runs, indent=1) + "\n")


def train(trainer: ORTTrainer | ORTSeq2SeqTrainer, engine: str, metric: str) -> dict[str, Any]:
    """Trains, evaluates and saves; the figures."""
    args, stopwatch = trainer.args, Stopwatch()
    trainer.add_callback(stopwatch)
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    report = trainer.ort_report
    if engine in ("onnxruntime", "aten") and report.fallback_calls:
        raise SystemExit(f"the training fell back to PyTorch: {report.training}")
    metrics = trainer.evaluate()
    trainer.save_model()
    print(f"\n{engine}: saved in {args.output_dir}\n{report}\n", flush=True)
    first = min(FIRST_STEPS, len(stopwatch.steps) - 1)
    seconds = sum(stopwatch.steps[first:])
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {
        "engine": engine,
        "graph_calls": report.graph_calls,
        "eager_calls": report.fallback_calls,
        "train_seconds": result.metrics["train_runtime"],
        "steps": len(stopwatch.steps),
        "first_steps": first,
        "seconds": seconds,
        "samples_per_second": batch * (len(stopwatch.steps) - first) / seconds,
        metric: metrics[metric],
        "eval_loss": metrics["eval_loss"],
    }


def table(runs: Sequence[dict[str, Any]], metric: str) -> str:
    """A row for each engine, compared with the first one after the first steps and in all."""
    base = runs[0]
    rows = [
        [
            "engine",
            "training",
            f"after {base['first_steps']} steps",
            "samples/s",
            "speed-up",
            "in all",
            metric,
            "eval_loss",
        ]
    ]
    for run in runs:
        speed, whole = run["samples_per_second"], run["train_seconds"]
        rows.append(
            [
                run["engine"],
                f"{whole:.2f} s",
                f"{run['seconds']:.2f} s",
                f"{speed:.1f}",
                f"{speed / base['samples_per_second']:.2f}x",
                f"{base['train_seconds'] / whole:.2f}x",
                f"{run[metric]:.4f}",
                f"{run['eval_loss']:.4f}",
            ]
        )
    widths = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]
    return "\n".join(
        "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
    )
