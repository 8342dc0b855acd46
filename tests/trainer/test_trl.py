"""trl's trainers through the mixin: losses and norms are those of trl itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ortrain import Options, ORTTrainerMixin

pytestmark = [
    pytest.mark.trl,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # trl's own
]

WORDS = [f"w{number}" for number in range(40)]
TOKENS = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), **sizes, **heads, **tokens))


def text(words: random.Random) -> str:
    return " ".join(words.choice(WORDS) for _ in range(words.randint(3, 8)))


def distinct(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def rows(*columns: str) -> Dataset:
    words = random.Random(0)
    return Dataset.from_list(
        [
            {name: bool(i % 2) if name == "label" else text(words) + " " for name in columns}
            for i in range(24)
        ]
    )


def trainer_of(name: str) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """The class, its arguments' class, what goes to the latter and to the former."""
    import trl

    if name == "SFT":
        return trl.SFTTrainer, trl.SFTConfig, {}, {"train_dataset": rows("text")}
    if name == "DPO":
        data = rows("prompt", "chosen", "rejected")
        return trl.DPOTrainer, trl.DPOConfig, {}, {"train_dataset": data, "ref_model": llama()}
    if name == "KTO":
        from trl.experimental.kto import KTOConfig, KTOTrainer

        data = rows("prompt", "completion", "label")
        return KTOTrainer, KTOConfig, {}, {"train_dataset": data, "ref_model": llama()}
    sizes = {"num_generations": 2, "max_completion_length": 4}
    data = {"train_dataset": rows("prompt"), "reward_funcs": distinct}
    return trl.GRPOTrainer, trl.GRPOConfig, sizes, data


@pytest.mark.parametrize(
    ("name", "bf16"),
    [("SFT", False), ("SFT", True), ("DPO", False), ("KTO", False), ("GRPO", False)],
)
def test_trl_trains_through_a_graph(tmp_path: Path, name: str, bf16: bool) -> None:
    kind, config, sizes, _ = trainer_of(name)

    class Through(ORTTrainerMixin, kind):  # type: ignore[misc,valid-type]
        pass

    found = []
    for cls, more in ((kind, {}), (Through, {"options": Options(engine="aten")})):
        args = config(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            gradient_checkpointing=False,
            bf16=bf16,
            **sizes,
        )
        data = trainer_of(name)[-1]
        torch.manual_seed(1)
        trainer = cls(model=llama(), args=args, processing_class=tokenizer(), **data, **more)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        found.append([(entry["loss"], entry["grad_norm"]) for entry in logs])
    assert len(found[0]) == 2
    for ours, theirs in zip(*reversed(found), strict=True):
        assert ours == pytest.approx(theirs, rel=5e-3 if bf16 else 1e-4)
    assert trainer.ort_report.graph_calls == 2
    assert trainer.ort_report.fallback_calls == 0
