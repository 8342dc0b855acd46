"""Work on tokens that nobody reads is left out: losses and gradients stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from ortrain.autodiff.engine import influences
from ortrain.capture.export import Captured, capture
from ortrain.graph.cost import Multiplications
from ortrain.passes.tokens import Packed, packed
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
    "one row of one": (11, 1, 5, 3),
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


@dataclass
class Case:
    """A model, what it is given, and what is read of its outputs."""

    make: Callable[[], nn.Module]
    given: Callable[[Batch], Batch]
    shown: Any = "all"
    left: bool = False


def of(architecture: str, **settings: Any) -> Callable[[], nn.Module]:
    """A small model by the name of its class."""

    def make() -> nn.Module:
        kind = getattr(transformers, architecture)
        shape = {name: size for name, size in SHAPE.items() if name not in settings}
        return kind(kind.config_class(**shape, **settings))  # type: ignore[no-any-return]

    return make


gpt2 = of("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2)
distilbert = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
CASES = {
    "bert": Case(of("BertForSequenceClassification"), of_rows),
    "roberta": Case(of("RobertaForSequenceClassification"), of_rows),
    "distilbert": Case(of("DistilBertForSequenceClassification", **distilbert), of_rows),
    "electra": Case(of("ElectraForSequenceClassification", embedding_size=8), of_rows),
    "albert": Case(of("AlbertForSequenceClassification", embedding_size=8), of_rows),
    "left-padded bert": Case(of("BertForSequenceClassification"), of_rows, left=True),
    "mean of words": Case(Sentences, lambda given: given),
    "tags": Case(of("BertForTokenClassification"), of_some_tags, "tokens"),
    "masked words": Case(of("RobertaForMaskedLM"), of_tokens, "loss"),
    "shown words": Case(of("BertForMaskedLM"), of_tokens, "tokens"),
    "gpt2": Case(gpt2, of_tokens, "loss"),
    "llama": Case(of("LlamaForCausalLM"), of_tokens, "loss"),
    "left-padded llama": Case(of("LlamaForCausalLM"), of_tokens, "loss", left=True),
}


@dataclass
class Taken:
    """One capture, and its program without the tokens that nobody reads."""

    case: Case
    module: nn.Module
    captured: Captured
    packed: Packed


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def taken(request: pytest.FixtureRequest) -> Taken:
    case = CASES[request.param]
    torch.manual_seed(0)
    module = case.make().train()
    captured = capture(module, (), case.given(batch(LENGTHS["some"], case.left)))
    found = packed(captured.program, case.shown)
    assert found is not None
    return Taken(case, module, captured, found)


def trained(
    taken: Taken, program: Program, given: Batch, engine: str
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of one step, with dropout, always from the same seed."""
    tensors = {**dict(taken.module.named_buffers()), **dict(taken.module.named_parameters())}
    users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
    reached = {value.name for value in influences(program.graph, users)}
    wrt = [v.name or "" for v in program.inputs(Role.PARAMETER) if v.name in reached]
    executor = engines.executor(engine, device=torch.device("cpu"), threads=1)
    plan = build(program, wrt, likely_upstream(program), executor)
    step = Step(plan, tensors, lambda _: step)
    names = [value.name for value in program.inputs(Role.USER_INPUT)]
    torch.manual_seed(7)
    outputs = step.train([given[name or ""] for name in names])
    parameters = dict(taken.module.named_parameters())
    found = torch.autograd.grad(outputs[0], [parameters[name] for name in wrt])
    return [t.detach() for t in outputs], dict(zip(wrt, found, strict=True))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("lengths", LENGTHS, ids="-".join)
def test_losses_and_gradients_are_those_of_the_whole_batch(
    taken: Taken, lengths: str, engine: str
) -> None:
    given = taken.case.given(batch(LENGTHS[lengths], taken.case.left))
    whole, wholes = trained(taken, taken.captured.program, given, engine)
    ours, gradients = trained(taken, taken.packed.program, given, engine)
    torch.testing.assert_close(ours[0], whole[0], rtol=1e-5, atol=0.0)
    largest = max(float(g.abs().max()) for g in wholes.values())
    assert gradients.keys() == wholes.keys()
    for name, expected in wholes.items():
        torch.testing.assert_close(
            gradients[name], expected, rtol=1e-4, atol=1e-6 * largest, msg=name
        )
    if taken.case.shown == "tokens":  # the others are zeros
        real = given["attention_mask"].bool()
        torch.testing.assert_close(ours[1][real], whole[1][real], rtol=1e-4, atol=1e-5)
        assert not ours[1][~real].any()


def test_only_what_is_read_is_computed(taken: Taken) -> None:
    """Products are for as many tokens as the mask, the labels or the position leave."""
    program, found = taken.captured.program, taken.packed
    whole = Multiplications(program.graph)
    sizes = {d: LENGTH for v in program.inputs(Role.USER_INPUT) for d in _symbols(v)}
    half = dict.fromkeys(found.symbols, LENGTH * LENGTH // 2)
    assert found.cost({**sizes, **half}) < 0.75 * whole(sizes)


def _symbols(value: Any) -> list[str]:
    return [d.value for d in value.shape or () if not isinstance(d, int) and d.value]
