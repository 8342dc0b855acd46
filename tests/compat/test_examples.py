"""A script in the words of Optimum's examples of 1.23 trains as it stands, as a graph."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
# What transformers 5 and datasets 5 took away, as the examples write it.
SCRIPT = """
import sys
import datasets
import transformers
from datasets import load_dataset, load_metric
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    PretrainedConfig,
    default_data_collator,
    is_torch_tpu_available,
    set_seed,
)
from transformers.testing_utils import CaptureLogger
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import check_min_version, is_offline_mode, send_example_telemetry
from transformers.utils.versions import require_version
from optimum.onnxruntime import ORTTrainer, ORTTrainingArguments

check_min_version("4.23.0")
require_version("datasets>=1.8.0", "To fix: pip install -r requirements.txt")
(training_args,) = HfArgumentParser((ORTTrainingArguments,)).parse_args_into_dataclasses()
send_example_telemetry("run_glue", training_args)
if is_offline_mode():
    print("offline")
set_seed(training_args.seed)
raw_datasets = load_dataset(
    "csv",
    data_files={"train": "train.csv"},
    cache_dir="cache",
    use_auth_token=True if training_args.push_to_hub else None,
    features=datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(num_classes=2)}
    ),
    task="text-classification",
)
config = AutoConfig.from_pretrained(
    "model", num_labels=2, finetuning_task=None, revision="main", use_auth_token=None
)
tokenizer = AutoTokenizer.from_pretrained(
    "model", cache_dir=None, use_fast=True, revision="main", use_auth_token=None
)
model = AutoModelForSequenceClassification.from_pretrained(
    "model", config=config, revision="main", use_auth_token=None
)
with tokenizer.as_target_tokenizer():
    assert tokenizer("good")["input_ids"] == tokenizer(text_target="good")["input_ids"]
train_dataset = raw_datasets["train"].map(
    lambda examples: tokenizer(examples["text"], padding="max_length", max_length=4), batched=True
)
trainer = ORTTrainer(
    model=model,
    args=training_args,
    train_dataset=train_dataset,
    tokenizer=tokenizer,
    data_collator=default_data_collator,
    preprocess_logits_for_metrics=None if is_torch_tpu_available() else lambda logits, _: logits,
)
trainer.train()
"""


def test_a_script_in_the_words_of_the_examples_trains_as_a_graph(tmp_path: Path) -> None:
    names = ["[PAD]", "[UNK]", "good", "bad", "film"]
    own = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]", model_max_length=4
    )
    tokenizer.save_pretrained(tmp_path / "model")
    config = BertConfig(
        vocab_size=5,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=4,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *[["good film", 1], ["bad film", 0]] * 4])
    (tmp_path / "run.py").write_text(SCRIPT)
    options = "--output_dir out --max_steps 2 --per_device_train_batch_size 4 --save_strategy no "
    options += "--evaluation_strategy no --disable_tqdm True --report_to none --ort_engine aten"
    done = subprocess.run(
        [sys.executable, "-m", "ortrain", "run", "run.py", *options.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert not done.returncode, done.stderr
    assert "offline" in done.stdout
    assert "2 of 2 forwards ran as a graph" in done.stdout + done.stderr
    assert "nothing is sent of run_glue" in done.stderr
