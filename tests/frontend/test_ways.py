"""The ways in which libraries and users come to the backend: each is as eager."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ortrain.frontend.backend import InPyTorch
from tests.frontend.compiling import compiled, expect_equal, expect_equal_steps
from tests.frontend.sharded_process import Blocks
from tests.processes import launch

pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_has_a_name() -> None:
    torch._dynamo.reset()
    module = Blocks()
    eager = copy.deepcopy(module)
    call = torch.compile(module, backend="ortrain", options={"engine": "onnxruntime"})
    expect_equal_steps(module, call, eager, lambda run: run(torch.ones(3, 8)).pow(2).sum())


def test_an_option_that_there_is_not_is_named() -> None:
    torch._dynamo.reset()
    call = torch.compile(Blocks(), backend="ortrain", options={"engin": "aten"})
    with pytest.raises(Exception, match="engin"):
        call(torch.ones(3, 8))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_sharded_blocks_train_as_in_pytorch(engine: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("sharded_process.py")
    ours = launch(script, tmp_path / "ours", 2, engine)
    eager = launch(script, tmp_path / "eager", 2, "")
    torch.testing.assert_close(ours[0], eager[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], eager[1], rtol=1e-4, atol=1e-5)
    assert ours[2]
    assert all(ours[2])


def test_regions_that_accelerate_compiles_share_a_step() -> None:
    accelerate = pytest.importorskip("accelerate.utils")
    torch._dynamo.reset()
    module, made = Blocks(), list[Any]()
    eager = copy.deepcopy(module)
    call = accelerate.compile_regions(module, backend=_noting(made))
    for rows in (4, 5, 7):
        x, found = torch.randn(rows, 8), []
        for each, run in ((module, call), (eager, eager)):
            each.zero_grad()
            loss = run(x).pow(2).sum()
            loss.backward()
            grads = {f"gradient of {n}": p.grad for n, p in each.named_parameters()}
            found.append({"loss": loss.detach(), **_plain(grads)})
        expect_equal(*found)
    assert not any(isinstance(each, InPyTorch) for each in made)
    # Of the first block, whose argument has no gradient, of the others and of the head, each for
    # its first size and for all others.
    assert len({id(each) for each in made}) == 6


def _noting(made: list[Any]) -> Any:
    from ortrain.frontend.backend import ortrain

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(ortrain(module, inputs))
        return made[-1]

    return backend


def _plain(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): grad for name, grad in grads.items()}


def test_functional_call_has_its_own_weights() -> None:
    module = Blocks()
    call, made = compiled(module)
    x = torch.randn(3, 8)
    call(x)
    for seed in range(3):
        torch.manual_seed(seed)
        own = {n: torch.randn_like(p).requires_grad_() for n, p in module.named_parameters()}
        found = []
        for run in (call, module):
            names = {f"_orig_mod.{n}" if run is call else n: p for n, p in own.items()}
            loss = functional_call(run, names, (x,)).pow(2).sum()
            found.append((loss.detach(), torch.autograd.grad(loss, list(own.values()))))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert made
    assert all(made)


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this PyTorch has one limit for all modules of a class",
)
def test_fifty_modules_of_a_class_have_a_step_each_and_leave_nothing() -> None:
    torch._dynamo.reset()
    made, gone = list[Any](), list[Any]()
    for seed in range(50):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 4 + seed % 3), nn.Tanh(), nn.Dropout(0.0), nn.Tanh())
        eager = copy.deepcopy(module)
        call = torch.compile(module, backend=_noting(made), isolate_recompiles=True)
        expect_equal_steps(module, call, eager, lambda run: run(torch.ones(3, 4)).pow(2).sum())
        gone += [weakref.ref(module), *map(weakref.ref, module.parameters())]
    assert len(made) == 50
    assert len({id(each) for each in made}) == 3
    assert not any(isinstance(each, InPyTorch) for each in made)
    del module, call, eager
    made.clear()
    gc.collect()
    assert not any(reference() is not None for reference in gone)
