"""Models on padded batches, for the tests that leave out work on tokens which nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ortrain.autodiff.engine import influences
from ortrain.program import Program, Role
from ortrain.runtime import engines
from ortrain.step.autograd import Step
from ortrain.step.build import build, likely_upstream

ROWS, LENGTH, WORDS = 4, 11, 100
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
# How many tokens each row has.
LENGTHS = {
    "some": (11, 4, 7, 9),
    "one row of one, none full": (8, 1, 5, 3),
    "one full row": (2, 3, 11, 2),
    "all full": (11, 11, 11, 11),
}
Batch = dict[str, Tensor]


def batch(lengths: tuple[int, ...], left: bool = False) -> Batch:
    """Ids and their mask, padded on the right, or on the left."""
    torch.manual_seed(3)
    ids = torch.randint(5, WORDS, (ROWS, LENGTH))
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    count = torch.tensor(lengths).unsqueeze(1)
    mask = (places >= LENGTH - count) if left else (places < count)
    return {"input_ids": ids, "attention_mask": mask.long()}


def of_rows(given: Batch) -> Batch:
    """A label for each row."""
    return {**given, "labels": torch.arange(ROWS) % 2}


def of_tokens(given: Batch, share: float = 0.4) -> Batch:
    """A label for some of the tokens."""
    ids, mask = given["input_ids"], given["attention_mask"].bool()
    chosen = mask & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < share)
    chosen |= mask & (mask.cumsum(1) == 1)  # one of each row at least
    return {**given, "labels": torch.where(chosen, ids, -100)}


def of_some_tags(given: Batch) -> Batch:
    labelled = of_tokens(given)
    tags = labelled["labels"]
    return {**labelled, "labels": torch.where(tags < 0, tags, tags % 2)}


def of_spans(given: Batch) -> Batch:
    """Where an answer starts and ends in each row."""
    last = given["attention_mask"].sum(1) - 1
    return {**given, "start_positions": last // 2, "end_positions": last}


def of_choices(given: Batch, choices: int = 2) -> Batch:
    """Some texts for each question, and which of them is right."""
    rows = {name: value.view(-1, choices, LENGTH) for name, value in given.items()}
    return {**rows, "labels": torch.arange(ROWS // choices) % choices}


def heard(given: Batch) -> Batch:
    """Sound for each row, and words of it."""
    torch.manual_seed(4)
    sound = torch.randn(ROWS, 8, 2 * LENGTH)
    return {"input_features": sound, "labels": of_tokens(given)["labels"]}


class Sentences(nn.Module):
    """Means of words, as sentence-transformers makes them, and a loss over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = transformers.BertModel(transformers.BertConfig(**SHAPE))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask.unsqueeze(-1).expand(hidden.size()).float()
        means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        scores = nn.functional.normalize(means) @ nn.functional.normalize(means).T
        return nn.functional.cross_entropy(20 * scores, torch.arange(len(means)))


class Smoothed(nn.Module):
    """A loss with smoothed labels that is spelled out, as transformers' trainer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.encoder(input_ids, attention_mask=attention_mask)[0]
        found = -nn.functional.log_softmax(logits, dim=-1)
        labels = labels.unsqueeze(-1)
        ignored = labels.eq(-100)
        loss = found.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(ignored, 0.0)
        smooth = found.sum(dim=-1, keepdim=True).masked_fill(ignored, 0.0)
        count = ignored.numel() - ignored.long().sum()
        return 0.9 * loss.sum() / count + 0.1 * smooth.sum() / (count * WORDS)


class Weighted(nn.Module):
    """Losses of words, each with a weight, that are flattened before."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.encoder(input_ids, attention_mask=attention_mask)[0]
        losses = nn.functional.cross_entropy(
            logits.view(-1, WORDS), input_ids.view(-1), reduction="none"
        )
        weights = attention_mask.view(-1).float()
        return (losses * weights).sum() / weights.sum()


@dataclass
class Case:
    """A model, what it is given, and what is read of its outputs.

    Attributes:
        share: of the multiplications, no more than which half of the tokens cost.
    """

    make: Callable[[], nn.Module]
    given: Callable[[Batch], Batch]
    shown: Any = "all"
    left: bool = False
    share: float = 0.75


def of(architecture: str, **settings: Any) -> Callable[[], nn.Module]:
    """A small model by the name of its class."""

    def make() -> nn.Module:
        kind = getattr(transformers, architecture)
        shape = {name: size for name, size in SHAPE.items() if name not in settings}
        return kind(kind.config_class(**shape, **settings))  # type: ignore[no-any-return]

    return make


gpt2 = of("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2)
distilbert = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
t5 = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8}
t5["decoder_start_token_id"] = 0
bart = {
    f"{part}_{name}": number
    for part in ("encoder", "decoder")
    for name, number in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
} | {"d_model": 16}
deberta = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
deberta |= {"max_relative_positions": 16, "problem_type": "single_label_classification"}
whisper = {**bart, "num_mel_bins": 8, "max_source_positions": LENGTH, "pad_token_id": 0}
whisper |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
eager = {"attn_implementation": "eager"}
CASES = {
    "bert": Case(of("BertForSequenceClassification"), of_rows),
    "roberta": Case(of("RobertaForSequenceClassification"), of_rows),
    "distilbert": Case(of("DistilBertForSequenceClassification", **distilbert), of_rows),
    "electra": Case(of("ElectraForSequenceClassification", embedding_size=8), of_rows),
    "albert": Case(of("AlbertForSequenceClassification", embedding_size=8), of_rows),
    "roformer": Case(of("RoFormerForSequenceClassification", embedding_size=16), of_rows),
    "left-padded bert": Case(of("BertForSequenceClassification"), of_rows, left=True),
    "modernbert": Case(of("ModernBertForSequenceClassification", pad_token_id=0), of_rows),
    "mean of words": Case(Sentences, lambda given: given),
    "smoothed labels": Case(Smoothed, of_tokens),
    "weighted losses": Case(Weighted, lambda given: given),
    "tags": Case(of("BertForTokenClassification"), of_some_tags, "tokens"),
    "masked words": Case(of("RobertaForMaskedLM"), of_tokens, "loss"),
    "shown words": Case(of("BertForMaskedLM"), of_tokens, "tokens"),
    "gpt2": Case(gpt2, of_tokens, "loss"),
    "llama": Case(of("LlamaForCausalLM"), of_tokens, "loss"),
    "llama with shared keys": Case(
        of("LlamaForCausalLM", num_key_value_heads=1), of_tokens, "loss"
    ),
    "t5": Case(of("T5ForConditionalGeneration", **t5), of_tokens, "loss"),
    "bart": Case(of("BartForConditionalGeneration", **bart), of_tokens, "loss"),
    "left-padded llama": Case(of("LlamaForCausalLM"), of_tokens, "loss", left=True),
    "left-padded gpt2": Case(gpt2, of_tokens, "loss", left=True),
    "bert spelled out": Case(of("BertForSequenceClassification", **eager), of_rows),
    "left-padded bert spelled out": Case(
        of("BertForSequenceClassification", **eager), of_rows, left=True
    ),
    "mpnet": Case(of("MPNetForSequenceClassification"), of_rows),
    "deberta-v2": Case(of("DebertaV2ForSequenceClassification", **deberta), of_rows, share=0.8),
    "deberta-v2 words": Case(of("DebertaV2ForMaskedLM", **deberta), of_tokens, "loss"),
    "gpt2 spelled out": Case(
        of("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, **eager), of_tokens, "loss"
    ),
    "left-padded gpt2 spelled out": Case(
        of("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, **eager),
        of_tokens,
        "loss",
        left=True,
    ),
    "t5 spelled out": Case(of("T5ForConditionalGeneration", **t5, **eager), of_tokens, "loss"),
    "whisper": Case(of("WhisperForConditionalGeneration", **whisper), heard, "loss", share=0.95),
    "answers": Case(of("BertForQuestionAnswering"), of_spans, "loss", share=0.95),
    "choices": Case(of("BertForMultipleChoice"), of_choices),
}
# Those that `make test` runs; of those that it leaves out each is like one of them.
SAMPLE = [
    "bert", "albert", "roformer", "left-padded bert", "modernbert", "mean of words",
    "smoothed labels", "weighted losses", "tags", "masked words", "gpt2",
    "llama with shared keys", "t5", "bart", "left-padded bert spelled out", "mpnet", "deberta-v2",
    "gpt2 spelled out", "whisper", "answers", "choices",
]  # fmt: skip


class Trained:
    """Steps of a program, with dropout, always from the same seed.

    Args:
        module: whose parameters it has.
        program: forward.
        engine: by name.
    """

    def __init__(self, module: nn.Module, program: Program, engine: str = "aten") -> None:
        self.parameters = dict(module.named_parameters())
        tensors = {**dict(module.named_buffers()), **self.parameters}
        users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
        reached = {value.name for value in influences(program.graph, users)}
        reached &= {name for name, value in tensors.items() if value.requires_grad}
        self.names = [v.name or "" for v in program.inputs(Role.PARAMETER) if v.name in reached]
        executor = engines.executor(engine, device=torch.device("cpu"), threads=1)
        plan = build(program, self.names, likely_upstream(program), executor)
        self.step = Step(plan, tensors, lambda _: self.step)
        self.inputs = [value.name or "" for value in program.inputs(Role.USER_INPUT)]

    def __call__(self, given: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs and gradients of the first."""
        torch.manual_seed(7)
        outputs = self.step.train([given[name] for name in self.inputs])
        found = torch.autograd.grad(outputs[0], [self.parameters[name] for name in self.names])
        return [t.detach() for t in outputs], dict(zip(self.names, found, strict=True))
