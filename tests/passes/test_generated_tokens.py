"""Generated modules: whatever is left out of them, losses and gradients are the dense graph's."""

from __future__ import annotations

import pytest
import torch

from ortrain.errors import OrtrainError
from ortrain.frontend.export import export
from ortrain.passes.tokens import packed
from tests.breadth import crossed
from tests.generated_tokens import WORDS, Generated
from tests.token_cases import LENGTHS, Batch, Trained, batch

SEEDS = crossed(range(400), one_in=20)


def given(lengths: tuple[int, ...], left: bool) -> Batch:
    """Words, of which the padded ones are anything, a mask, and labels of some of them."""
    made = batch(lengths, left)
    ids, mask = made["input_ids"] % WORDS, made["attention_mask"]
    generator = torch.Generator().manual_seed(2)
    labelled = mask.bool() & (torch.rand(ids.shape, generator=generator) < 0.5)
    labelled[:, 0] |= mask[:, 0].bool()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(labelled, -100)}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_out_changes_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    module = Generated(seed).train()
    try:
        exported = export(module, (), given(LENGTHS["some"], left=False))
    except OrtrainError as error:
        pytest.skip(f"no graph: {error.what}")
    found = packed(exported.program, "all")
    if found is None:
        return  # all is read: the table has many of those
    dense, frugal = Trained(module, exported.program), Trained(module, found.program)
    for lengths in LENGTHS.values():
        for left in (False, True):
            of = given(lengths, left)
            (whole, wholes), (ours, gradients) = dense(of), frugal(of)
            torch.testing.assert_close(ours[0], whole[0], rtol=1e-5, atol=1e-7, equal_nan=True)
            assert gradients.keys() == wholes.keys()
            # What is no number at a token that nobody reads makes gradients none: that is left out.
            pairs = [(gradients[n][b.isfinite()], b[b.isfinite()]) for n, b in wholes.items()]
            largest = max((float(b.abs().max()) for _, b in pairs if b.numel()), default=0.0)
            for mine, expected in pairs:
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6 * max(largest, 1.0))
