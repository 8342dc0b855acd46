"""ORTModule leaves out work on tokens that nobody reads, where that shows in nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.step import tokens
from tests.breadth import crossed
from tests.token_cases import (
    CASES,
    LENGTH,
    LENGTHS,
    SAMPLE,
    SHAPE,
    WORDS,
    Batch,
    batch,
    distilbert,
    of,
    of_rows,
    of_tokens,
)


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small models, too."""
    monkeypatch.setattr(tokens, "LEAST", 0)


def wrapped(module: nn.Module, shown: str, engine: Any = "aten") -> ORTModule:
    """Of outputs that are read as a case has it."""
    skips = True if shown == "tokens" else None
    options = Options(engine=engine, skip_padding=skips, fallback="raise")
    model = ORTModule(module, options=options)
    model.only_loss_is_read = shown == "loss"
    return model


def quiet(module: nn.Module) -> nn.Module:
    """The module without dropout, which PyTorch draws by another generator."""
    for layer in module.modules():
        for name, value in [*vars(layer).items()]:
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(layer, name, 0.0)
    return module.train()


def loss_of(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else output[0]
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize(
    ("name", "engine"), crossed(CASES, ["aten", "onnxruntime"], one_in=2, sample=SAMPLE[::2])
)
def test_training_is_eagers_at_every_density_with_one_capture(name: str, engine: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    eager = quiet(case.make())
    model = wrapped(copy.deepcopy(eager), case.shown, engine)
    for lengths in LENGTHS.values():
        given = case.given(batch(lengths, case.left))
        expected, ours = loss_of(eager(**given)), loss_of(model(**given))
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
        ours.backward()
        expected.backward()
        largest = max(float(p.grad.abs().max()) for p in eager.parameters() if p.grad is not None)
        for (key, own), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (own.grad is None) == (theirs.grad is None), key
            if own.grad is not None:
                torch.testing.assert_close(
                    own.grad, theirs.grad, rtol=1e-3, atol=2e-6 * largest, msg=key
                )
        model.zero_grad()
        eager.zero_grad()
    assert model.report.captures == 1
    assert model.report.left_out >= 3


LAST_POSITIONS = {
    "BertForSequenceClassification": {"max_position_embeddings": LENGTH},
    "DistilBertForSequenceClassification": {"max_position_embeddings": LENGTH, **distilbert},
    "ElectraForSequenceClassification": {"max_position_embeddings": LENGTH, "embedding_size": 8},
    "GPT2LMHeadModel": {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2},
}


@pytest.mark.parametrize("name", LAST_POSITIONS)
def test_padding_up_to_the_last_position_is_left_out(name: str) -> None:
    """And shorter batches have the same graph: a table of positions ends there, no length does."""
    eager = quiet(of(name, **LAST_POSITIONS[name])())
    eager.config.problem_type = "single_label_classification"  # which a first call would set
    model = wrapped(copy.deepcopy(eager), "loss" if name == "GPT2LMHeadModel" else "all")
    given = batch(LENGTHS["some"])
    given = of_tokens(given) if name == "GPT2LMHeadModel" else of_rows(given)
    for _ in range(2):
        torch.testing.assert_close(loss_of(model(**given)), loss_of(eager(**given)))
    for each, value in given.items():
        given[each] = value[..., : LENGTH - 2].contiguous()
    torch.testing.assert_close(loss_of(model(**given)), loss_of(eager(**given)))
    assert model.report.captures == 1
    assert model.report.left_out >= 2


class Pooled(nn.Module):
    """A small encoder, and what a test makes of its words."""

    def __init__(self, use: Callable[[Pooled, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SHAPE["hidden_size"])
        self.hidden = nn.Linear(SHAPE["hidden_size"], SHAPE["hidden_size"])
        self.norm = nn.BatchNorm1d(SHAPE["hidden_size"])
        self.convolution = nn.Conv1d(SHAPE["hidden_size"], SHAPE["hidden_size"], 3, padding=1)
        self.use = use

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = torch.tanh(self.hidden(self.embedding(input_ids)))
        return self.use(self, words, attention_mask)


def masked(words: Tensor, mask: Tensor) -> Tensor:
    return (words * mask.unsqueeze(-1)).sum(1).pow(2).mean()


def attended(words: Tensor, mask: Tensor) -> Tensor:
    """With a mask that takes 10 from what is shut out, which still counts a little."""
    shut = (1 - mask.float())[:, None, None, :] * -10
    heads = words.unsqueeze(1)
    found = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=shut)
    return found[:, 0, 0].pow(2).mean()


def asked(words: Tensor, mask: Tensor) -> Tensor:
    """With a mask that shuts out queries, and no keys."""
    open_ = mask.bool()[:, None, :, None]
    heads = words.unsqueeze(1)
    found = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=open_)
    return found[:, 0, 0].pow(2).mean()


NEEDED: dict[str, Callable[[Pooled, Tensor, Tensor], Tensor]] = {
    "a mean over all positions": lambda m, words, mask: words.mean(1).pow(2).mean(),
    "the largest of all positions": lambda m, words, mask: words.amax(1).pow(2).mean(),
    "statistics over tokens": lambda m, words, mask: masked(
        m.norm(words.transpose(1, 2)).transpose(1, 2), mask
    ),
    "a convolution over the length": lambda m, words, mask: masked(
        m.convolution(words.transpose(1, 2)).transpose(1, 2), mask
    ),
    "a mask that shuts nothing out": lambda m, words, mask: attended(words, mask),
    "a mask of queries": lambda m, words, mask: asked(words, mask),
    "words that are shown": lambda m, words, mask: words,
    "the order of words": lambda m, words, mask: masked(words.flip(1), mask),
    "sums up to each word": lambda m, words, mask: masked(words.cumsum(1), mask),
    "weights that are learned": lambda m, words, mask: masked(
        words * torch.sigmoid(words[:, :, :1]), torch.ones_like(mask)
    ),
    "a softmax over all positions": lambda m, words, mask: (
        (words * torch.softmax(words[:, :, :1], 1)).sum(1).pow(2).mean()
    ),
    "weights that are hardly anything": lambda m, words, mask: (
        (words * (mask.unsqueeze(-1) + 1e-6)).sum(1).pow(2).mean()
    ),
    "a mask that is opened again": lambda m, words, mask: masked(words, mask + (1 - mask)),
    "what a mask does not fill": lambda m, words, mask: (
        words.masked_fill(mask.unsqueeze(-1) == 5, 0.0).sum(1).pow(2).mean()
    ),
    "a place that values decide": lambda m, words, mask: (
        words.gather(1, (mask.sum(1) - 1)[:, None, None].expand(-1, 1, words.shape[2]))
        .pow(2)
        .mean()
    ),
}


@pytest.mark.parametrize("name", NEEDED)
def test_what_reads_all_tokens_gets_all(name: str) -> None:
    torch.manual_seed(0)
    eager = Pooled(NEEDED[name])
    model = wrapped(copy.deepcopy(eager), "all")
    for lengths in LENGTHS.values():
        given = batch(lengths)
        expected, ours = eager(**given), model(**given)
        torch.testing.assert_close(ours, expected)
        ours.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(model.embedding.weight.grad, eager.embedding.weight.grad)
    assert not model.report.left_out


LOWEST = torch.finfo(torch.float32).min


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def filled(mask: Tensor, number: float) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask == 0, number)[:, None, None, :]


# What a mask [B, S] becomes, and whether keys are known to be shut out by it.
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "true or false": (lambda m: m.bool()[:, None, None, :], True),
    "not padded": (lambda m: ~(m == 0)[:, None, None, :], True),
    "for each query": (lambda m: m.bool()[:, None, None, :] & m.bool()[:, None, :, None], True),
    "and causal": (lambda m: m.bool()[:, None, None, :] & causal(m.shape[1]), True),
    "or itself": (
        lambda m: m.bool()[:, None, None, :] | torch.eye(m.shape[1], dtype=torch.bool), False
    ),
    "the lowest number": (lambda m: (1.0 - m.float())[:, None, None, :] * LOWEST, True),
    "minus infinity": (lambda m: filled(m, -torch.inf), True),
    "filled in": (lambda m: filled(m, LOWEST), True),
    "chosen": (lambda m: torch.where(m.bool(), 0.0, LOWEST)[:, None, None, :], True),
    "lowest and causal": (
        lambda m: torch.where(causal(m.shape[1]), 0.0, LOWEST) + filled(m, LOWEST), True
    ),
    "beside a bias": (
        lambda m: torch.arange(m.shape[1]).div(9).expand(m.shape[1], -1) + filled(m, LOWEST),
        True,
    ),
    "only -10,000": (lambda m: filled(m, -10_000.0), False),
    "a weight": (lambda m: m.float()[:, None, None, :], False),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_leaves_out_what_it_shuts_out_and_nothing_else(name: str) -> None:
    """Of rows without a word, too, which attend to nothing, or to everything alike."""
    make, shuts = MASKS[name]

    def use(module: Pooled, words: Tensor, mask: Tensor) -> Tensor:
        heads = words.unsqueeze(1)
        found = nn.functional.scaled_dot_product_attention(
            heads, heads, heads, attn_mask=make(mask)
        )
        return found[:, 0, 0].pow(2).mean()

    torch.manual_seed(0)
    eager = Pooled(use)
    model = wrapped(copy.deepcopy(eager), "all")
    for lengths in [*LENGTHS.values(), (0, 3, 11, 5), (0, 0, 0, 0)]:
        for left in (False, True):
            given = batch(lengths, left)
            expected, ours = eager(**given), model(**given)
            torch.testing.assert_close(ours, expected)
            for each in (model, eager):
                each.zero_grad()
            ours.backward()
            expected.backward()
            for own, theirs in zip(model.parameters(), eager.parameters(), strict=True):
                if theirs.grad is not None:
                    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert bool(model.report.left_out) == shuts
    assert model.report.captures == 1


class Towers(nn.Module):
    """Two encoders over texts of their own lengths, of each of which the first word is read."""

    def __init__(self) -> None:
        super().__init__()
        kind = of("BertModel")
        self.left, self.right = kind(), kind()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, others: Tensor, other_mask: Tensor
    ) -> Tensor:
        left = self.left(input_ids, attention_mask=attention_mask)[0][:, 0]
        right = self.right(others, attention_mask=other_mask)[0][:, 0]
        return nn.functional.cross_entropy(left @ right.T, torch.arange(len(left)))


def test_texts_of_two_lengths_have_sets_of_their_own() -> None:
    torch.manual_seed(0)
    eager = quiet(Towers())
    model = wrapped(copy.deepcopy(eager), "all")
    for lengths in LENGTHS.values():
        given, other = batch(lengths), batch(tuple(min(n, 6) for n in reversed(lengths)))
        others = {"others": other["input_ids"][:, :6], "other_mask": other["attention_mask"][:, :6]}
        expected, ours = eager(**given, **others), model(**given, **others)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
        ours.backward()
        expected.backward()
        for own, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert model.report.left_out == len(LENGTHS)


def test_a_sum_weighted_by_the_mask_is_of_real_words() -> None:
    torch.manual_seed(0)
    eager = Pooled(lambda m, words, mask: masked(words, mask))
    model = wrapped(copy.deepcopy(eager), "all")
    given = batch(LENGTHS["some"])
    torch.testing.assert_close(model(**given), eager(**given))
    assert model.report.left_out == 1
    assert "left out in 1 calls" in str(model.report)


def outputs_of(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    output = model(**given)
    return output.loss, output.logits


def test_logits_that_are_shown_are_whole_unless_their_zeros_are_asked_for() -> None:
    torch.manual_seed(0)
    eager = quiet(of("BertForTokenClassification")())
    given = of_rows(batch(LENGTHS["some"]))
    given["labels"] = torch.where(given["attention_mask"].bool(), 1, -100)
    real = given["attention_mask"].bool()
    expected = outputs_of(eager, given)[1]
    whole = outputs_of(wrapped(copy.deepcopy(eager), "all"), given)[1]
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    skipped = outputs_of(wrapped(copy.deepcopy(eager), "tokens"), given)[1]
    torch.testing.assert_close(skipped[real], expected[real], rtol=1e-4, atol=1e-5)
    assert not skipped[~real].any()


def test_gradients_of_shown_logits_are_those_of_real_tokens() -> None:
    torch.manual_seed(0)
    eager = quiet(of("BertForTokenClassification")())
    model = wrapped(copy.deepcopy(eager), "tokens")
    given = batch(LENGTHS["some"])
    real = given["attention_mask"].unsqueeze(-1)
    (eager(**given).logits * real).pow(2).sum().backward()
    model(**given).logits.pow(2).sum().backward()
    assert model.report.left_out == 1
    for own, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_switched_off_all_tokens_are_computed() -> None:
    eager = quiet(of("BertForSequenceClassification")())
    model = ORTModule(eager, options=Options(engine="aten", skip_padding=False))
    model(**of_rows(batch(LENGTHS["some"])))
    assert not model.report.left_out
    assert "tokens" not in str(model.report)


def test_a_batch_without_labels_is_computed_whole() -> None:
    torch.manual_seed(0)
    eager = quiet(of("RobertaForMaskedLM")())
    model = wrapped(copy.deepcopy(eager), "loss")
    labelled = of_tokens(batch(LENGTHS["some"]))
    model(**labelled)[0].backward()
    assert model.report.left_out == 1
    none = {**labelled, "labels": torch.full_like(labelled["labels"], -100)}
    assert model(**none)[0].isnan()
    assert eager(**none)[0].isnan()
    assert model.report.left_out == 1


def test_small_calls_count_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LEAST", 1 << 40)
    eager = quiet(of("BertForSequenceClassification")())
    model = wrapped(eager, "all")
    monkeypatch.setattr(tokens.Tokens, "counts", lambda *_: pytest.fail("counted"))
    model(**of_rows(batch(LENGTHS["some"])))
    assert not model.report.left_out


def test_what_nobody_reads_is_there_once_somebody_does() -> None:
    torch.manual_seed(0)
    eager = quiet(of("RobertaForMaskedLM")())
    model = wrapped(copy.deepcopy(eager), "loss")
    given = of_tokens(batch(LENGTHS["some"]))
    model(**given)  # whose loss is known from then on
    loss, logits = outputs_of(model, given)
    labelled = given["labels"] >= 0
    expected, all_logits = outputs_of(eager, given)
    torch.testing.assert_close(loss, expected)
    assert not logits[~labelled].any()
    model.only_loss_is_read = False
    torch.testing.assert_close(outputs_of(model, given)[1], all_logits, rtol=1e-4, atol=1e-5)
