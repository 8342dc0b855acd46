"""Weights that a hook of PyTorch normalizes in front of each call: part of the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule
from tests.module.agreement import SAME

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")

NORMALIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight": nn.utils.weight_norm,
    "spectral": nn.utils.spectral_norm,
}


class Critic(nn.Module):
    """Scores real and made sounds, in two calls of the same layers."""

    def __init__(self, normalized: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.frames, self.hidden = normalized(nn.Conv1d(2, 4, 3)), normalized(nn.Linear(4, 4))
        self.score = nn.Linear(4, 1)

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        def score(sound: Tensor) -> Tensor:
            hidden = F.leaky_relu(self.frames(sound)).mean(-1)
            return torch.as_tensor(self.score(F.leaky_relu(self.hidden(hidden))))

        return F.relu(1 - score(real)).mean() + F.relu(1 + score(made)).mean()


def pair(kind: str) -> tuple[Critic, Critic]:
    """Two critics with the same weights; none can be copied, as their weights are computed."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Critic(NORMALIZED[kind]))
    return made[0], made[1]


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("kind", NORMALIZED)
def test_training_and_evaluation_are_those_of_pytorch(kind: str, engine: str) -> None:
    module, eager = pair(kind)
    graph = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, eager)]
    for rows, training in ((2, True), (3, True), (2, False), (3, True)):
        graph.train(training)
        eager.train(training)
        real, fake = torch.randn(rows, 2, 9), torch.randn(rows, 2, 9)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, its = graph(real, fake), eager(real, fake)
        torch.testing.assert_close(loss, its, rtol=SAME, atol=SAME)
        loss.backward()
        its.backward()
        for mine, other in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=SAME, atol=SAME)
        for mine, other in zip(module.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=SAME, atol=SAME)
        for optimizer in optimizers:
            optimizer.step()
    # A spectral norm moves its vectors in training alone.
    assert (graph.report.mode, graph.report.captures) == ("graph", 1 if kind == "weight" else 2)


@pytest.mark.parametrize("kind", NORMALIZED)
def test_a_call_in_pytorch_in_between_makes_no_new_graph(kind: str) -> None:
    module, _ = pair(kind)
    graph = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    inputs = torch.randn(2, 2, 9), torch.randn(2, 2, 9)
    for _ in range(2):
        graph(*inputs).backward()
        module(*inputs).backward()
    assert graph.report.captures == 1


def test_without_its_hook_the_module_is_another() -> None:
    module, _ = pair("weight")
    graph = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    inputs = torch.randn(2, 2, 9), torch.randn(2, 2, 9)
    before = graph(*inputs).detach()
    nn.utils.remove_weight_norm(module.hidden)
    torch.testing.assert_close(graph(*inputs).detach(), before, rtol=SAME, atol=SAME)
    assert graph.report.mode == "graph"
    assert module.hidden.weight.grad is None
    graph(*inputs).backward()
    assert module.hidden.weight.grad is not None


def test_a_hook_of_another_kind_beside_it_is_part_of_the_graph_too() -> None:
    module, eager = pair("weight")
    for each in (module, eager):
        each.hidden.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    graph = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    inputs = torch.randn(2, 2, 9), torch.randn(2, 2, 9)
    loss, its = graph(*inputs), eager(*inputs)
    torch.testing.assert_close(loss, its, rtol=SAME, atol=SAME)
    loss.backward()
    its.backward()
    for mine, other in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=SAME, atol=SAME)
    assert (graph.report.mode, graph.report.captures) == ("graph", 1)
