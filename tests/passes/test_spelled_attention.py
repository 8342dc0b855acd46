"""Attention that is spelled out: what its masks shut out is left out, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ortrain.frontend.export import Exported, export
from ortrain.passes.tokens import demands, packed
from ortrain.passes.tokens.kept import Keys
from tests.breadth import crossed, sampled
from tests.spelled_cases import OPEN, PRODUCTS, READ, Spelled, Spelling, drawn
from tests.token_cases import LENGTHS, Batch, Trained, batch


def exported(module: nn.Module, given: Batch | None = None) -> Exported:
    """In which weights are large, so that scores tell keys apart."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return export(module, (), given or batch(LENGTHS["some"]))


def batches(empty: bool) -> list[Batch]:
    """Padded on the right and on the left; some with a row that has no word."""
    lengths = [*LENGTHS.values(), *([(0, 3, 11, 5)] if empty else [])]
    return [batch(each, left) for each in lengths for left in (False, True)]


def same(module: nn.Module, found: Exported, given: list[Batch]) -> None:
    """Losses and gradients are those of the whole program, with the same dropout.

    Where those are numbers: NaN at a token that nobody reads, times zero, is left out with it.
    """
    ours = packed(found.program)
    if ours is None:
        return
    whole, fewer = Trained(module, found.program), Trained(module, ours.program)
    for each in given:
        expected, gradients = whole(each)
        loss, fewer_gradients = fewer(each)
        if expected[0].isnan():
            continue
        torch.testing.assert_close(loss[0], expected[0], rtol=1e-5, atol=0.0)
        numbers = {name: gradient.isfinite() for name, gradient in gradients.items()}
        largest = max(float(gradients[n].where(of, 0.0).abs().max()) for n, of in numbers.items())
        for name, of in numbers.items():
            mine, wholes = fewer_gradients[name][of], gradients[name][of]
            torch.testing.assert_close(mine, wholes, rtol=1e-4, atol=2e-6 * largest, msg=name)


def keys_of(found: Exported) -> set[Keys]:
    """Those by which something is left out."""
    plans = demands(found.program).plans
    return {each for _, kept in plans.values() for each in kept if isinstance(each, Keys)}


# Masks, in order, and whether keys are known to be shut out by them.
SHUTS: dict[tuple[str, ...], bool] = {
    ("added padding lowest",): True,
    ("added not padding low",): True,
    ("times padding lowest",): True,
    ("filled padding lowest",): True,
    ("chosen not padding lowest",): True,
    ("added before lowest",): True,
    ("added padding -inf",): True,
    ("filled padding -inf",): True,
    ("logarithm",): True,
    ("added padding -10,000",): False,
    ("filled padding -10,000",): True,  # of the scores that it replaces; values are all read
    ("added causal lowest",): False,
    ("added queries lowest",): False,
    ("added or itself lowest",): True,  # a call tells that none is: each is seen by itself
    ("added padding and causal lowest",): True,
    ("filled padding and causal -inf",): True,
    ("filled both sides lowest",): True,
    ("added causal lowest", "added padding lowest"): True,
    ("filled padding lowest", "filled causal low"): True,
    ("chosen causal -10,000", "added padding lowest"): True,
    ("filled padding -inf", "added before lowest"): True,
    ("biased", "added padding lowest"): True,
    ("added padding lowest", "biased"): True,
    ("biased_mask",): True,
    ("gated",): True,
    ("gated", "filled causal lowest"): True,
    ("capped", "scaled", "added padding lowest"): True,
    ("squared", "centred", "added padding lowest"): True,
    ("added padding lowest", "capped"): False,
    ("added padding lowest", "scaled"): False,
    ("added padding lowest", "bounded"): False,
    ("added padding lowest", "lifted"): False,
    ("added padding lowest", "raised"): True,
    ("raised", "added padding lowest"): True,
    ("added padding lowest", "reopened"): True,  # all keys where some are padding
    ("reopened", "added padding lowest"): True,
    ("added padding lowest", "centred"): False,
    ("added padding lowest", "capped", "filled before lowest"): True,
}


@pytest.mark.parametrize("names", crossed(SHUTS, one_in=2), ids=", then ".join)
def test_keys_that_masks_shut_out_are_left_out_and_no_others(names: tuple[str, ...]) -> None:
    """All queries are read: those that are shut out from every key, too."""
    torch.manual_seed(0)
    module = Spelled(Spelling((names, names), read="all")).train()
    found = exported(module)
    assert bool(keys_of(found)) == SHUTS[names]
    infinite = any("-inf" in name for name in names) or names == ("logarithm",)
    given = batches(empty=not infinite)
    if infinite:  # of a query that sees no key it makes NaN
        given = [each for each in given if "causal" not in str(names) or _right(each)]
    same(module, found, given)


def _right(given: Batch) -> bool:
    return bool(given["attention_mask"][:, 0].all())


@pytest.mark.parametrize(("read", "product"), crossed(READ, PRODUCTS, one_in=4))
def test_products_of_every_form_are_the_same_as_whole(read: str, product: str) -> None:
    torch.manual_seed(0)
    names = ("added causal lowest", "added padding lowest")
    module = Spelled(Spelling((names,), product, dropout=0.2, read=read)).train()
    found = exported(module)
    assert keys_of(found)
    same(module, found, batches(empty=True)[::3])


# The last had masks that cancel out, of which one was left out.
LOTS = [*map(str, range(60)), "1114"]


@pytest.mark.parametrize("number", sampled(LOTS, [*LOTS[:4], "1114"]))
def test_masks_by_lot_change_no_number(number: str) -> None:
    torch.manual_seed(0)
    module = Spelled(drawn(int(number))).train()
    same(module, exported(module), batches(empty=True)[::2])


def test_layers_under_one_mask_have_one_set_of_keys() -> None:
    """By which queries that are lost are not counted, where nobody reads them."""
    torch.manual_seed(0)
    names = ("filled both sides lowest",)
    found = exported(Spelled(Spelling((names,) * 4)))
    keys = keys_of(found)
    assert len(keys) == 1
    ours = packed(found.program)
    assert ours is not None
    assert len(ours.sets) == 3  # the first words, the keys, and both


class Shown(nn.Module):
    """Whose scores, or weights, somebody reads beside the softmax."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.inner = Spelled(Spelling((("added padding lowest",),)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.inner.layers[0]
        words = self.inner.embedding(input_ids)
        scores = layer.query(words) @ layer.key(words).transpose(1, 2)
        shut = torch.where(attention_mask == 0, torch.finfo(torch.float32).min, 0.0)
        scores = scores + shut[:, None, :]
        weights = torch.softmax(scores, -1)
        loss = (weights @ layer.value(words))[:, 0].pow(2).mean()
        if self.what == "slope":  # nothing in the loss, and all in the gradient
            loss = loss + (scores - scores.detach()).mean()
        return loss, weights if self.what == "weights" else scores


@pytest.mark.parametrize("what", ["scores", "weights", "slope"])
def test_scores_and_weights_that_others_read_are_whole(what: str) -> None:
    torch.manual_seed(0)
    module = Shown(what).train()
    found = exported(module)
    ours = packed(found.program)
    assert ours is not None
    assert not ours.partial
    whole, fewer = Trained(module, found.program), Trained(module, ours.program)
    for each in batches(empty=True):
        torch.testing.assert_close(fewer(each)[0][1], whole(each)[0][1])
    same(module, found, batches(empty=True))


class Fused(nn.Module):
    """PyTorch's function of attention, with masks of minus infinity."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.inner = Spelled(Spelling((("scaled",),)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        layer = self.inner.layers[0]
        words = self.inner.embedding(input_ids)
        q, k, v = (f(words).unsqueeze(1) for f in (layer.query, layer.key, layer.value))
        mask = torch.where(OPEN[self.name](attention_mask), 0.0, -torch.inf)
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found[:, :, 0].pow(2).mean() + found[:, :, -1].pow(2).mean()


@pytest.mark.parametrize("name", OPEN)
def test_queries_that_see_no_key_find_nothing(name: str) -> None:
    torch.manual_seed(0)
    module = Fused(name).train()
    same(module, exported(module), batches(empty=True))


class Crossed(nn.Module):
    """Queries of one text, keys of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Spelled(Spelling((("added padding lowest",),)))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, others: Tensor, other_mask: Tensor
    ) -> Tensor:
        layer = self.inner.layers[0]
        words, memory = self.inner.embedding(input_ids), self.inner.embedding(others)
        scores = layer.query(words) @ layer.key(memory).transpose(1, 2)
        # A query that is padding sees no key, by a number: all of them alike.
        seen = (attention_mask[:, :, None] * other_mask[:, None, :]).bool()
        scores = scores.masked_fill(~seen, torch.finfo(torch.float32).min)
        found = torch.softmax(scores, -1) @ layer.value(memory)
        return found[:, -1].pow(2).mean()


def test_queries_of_one_length_see_keys_of_another() -> None:
    torch.manual_seed(0)
    module = Crossed().train()

    def given(left: bool) -> Batch:
        memory = batch((3, 6, 2, 1), not left)
        other = {"others": memory["input_ids"][:, :7], "other_mask": memory["attention_mask"]}
        other["other_mask"] = other["other_mask"][:, :7] if left else other["other_mask"][:, -7:]
        return {**batch(LENGTHS["some"], left), **other}

    found = exported(module, given(False))
    assert keys_of(found)
    same(module, found, [given(False), given(True)])
