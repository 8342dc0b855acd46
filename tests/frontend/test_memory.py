"""What comparisons and graphs of one module hold, and that nothing is lost where they let go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.frontend import proof
from ortrain.step.agreement import compare
from ortrain.step.digest import Digest
from ortrain.step.evidence import Evidence
from ortrain.step.saved_forward import SavedForward


class Words(nn.Module):
    """Predicts a word for each of a batch, with labels that only a product of sizes ties to it."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(30, 8), nn.Dropout(drop)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 30)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(self.table(ids))
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        logits = self.head(torch.tanh(h))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits


def batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 30, (count, 5)), torch.randint(0, 30, (count, 5))


def step(model: nn.Module, given: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss, _ = model(*given)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads, **{n: b.clone() for n, b in model.named_buffers()}}


def assert_same(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    names = [name.removeprefix("_module.") for name in ours]
    for name, found in zip(names, ours.values(), strict=True):
        torch.testing.assert_close(found, eager[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("count", "compared"), [(8, 4), (5, 2), (2, 2)])
def test_a_graph_is_compared_on_half_of_a_batch(
    monkeypatch: pytest.MonkeyPatch, count: int, compared: int
) -> None:
    seen: list[set[int]] = []
    proven = proof._proven

    def noted(trial: Any, known: Any) -> Any:
        whole = [each for each in trial.args if isinstance(each, Tensor)]
        seen.append({each.shape[0] for each in whole if each.dtype == torch.int64 and each.dim()})
        return proven(trial, known)

    monkeypatch.setattr(proof, "_proven", noted)
    module = Words()
    model = ORTModule(copy.deepcopy(module), options=Options(engine="aten"))
    given = batch(count)
    assert_same(step(model, given), step(module, given))
    assert seen == [{compared}]


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_backward_beside_the_users_frees_what_the_forward_has_saved(
    monkeypatch: pytest.MonkeyPatch, drop: float
) -> None:
    again: list[Any] = []
    save_again = SavedForward.save_again

    def noted(kept: SavedForward) -> None:
        again.append([*kept.stash])
        save_again(kept)

    monkeypatch.setattr(SavedForward, "save_again", noted)
    module = Words(drop)
    model = ORTModule(
        copy.deepcopy(module), options=Options(engine="aten", certificate="each size")
    )
    for number, count in enumerate((6, 8, 7)):
        given = batch(count)
        ours, before = step(model, given), len(again)
        assert before == (number > 0)  # the second call is compared with the module
        if not drop:
            assert_same(ours, step(module, given))
    assert again == [[None]]
    assert model.report.graph_calls == 3


class Rough:
    """A call that PyTorch repeats within some share, where it is rounded otherwise."""

    precision = torch.float32

    def __init__(self, value: Tensor, share: float) -> None:
        self.value, self.share = value, share
        self.asked: list[torch.dtype | None] = []

    def given(self) -> list[Tensor]:
        return [self.value]

    def typical(self) -> float:
        return 1.0

    def near(self, share: float, seed: int) -> Evidence:
        drawn = torch.randn(self.value.shape, generator=torch.Generator().manual_seed(seed))
        value = self.value * (1 + share * drawn)
        found = Evidence()
        found.outputs["y"] = Digest.of(value, 4), False
        return found

    def eager(self, dtype: torch.dtype | None = None, rounding: int = 0) -> Evidence:
        self.asked.append(dtype)
        return self.near(self.share * bool(rounding or dtype), 100 + rounding)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("share", "holds", "wide"), [(1e-3, True, False), (0.1, False, True)])
def test_float64_is_asked_for_what_roundings_do_not_explain(
    share: float, holds: bool, wide: bool, seed: int
) -> None:
    trial = Rough(torch.randn(4000, generator=torch.Generator().manual_seed(0)), 1e-3)

    def graph(_: int) -> Evidence:
        return trial.near(share, seed)

    found = compare(trial.near(0.0, 0), graph(0), trial, graph)
    assert bool(found.faults) is not holds
    assert (torch.float64 in trial.asked) is wide


class Alone(Words):
    """Has no copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        raise TypeError("it is the only one")


def test_a_comparison_that_raises_is_told() -> None:
    model = ORTModule(Alone(), options=Options(engine="aten"))
    for _ in range(2):
        step(model, batch(4))
    assert model.report.graph_calls == 2
    told = "the module itself is not compared: TypeError: it is the only one"
    assert told in model.report.certificate
