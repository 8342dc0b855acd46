"""ORTModule around what other libraries have put around a module already."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ortrain import Options, ORTModule
from ortrain.errors import NotServed

SAME = 1e-5


def a_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def trained(model: nn.Module, parameters: list[Tensor]) -> list[Tensor]:
    """Losses and parameters of three steps."""
    optimizer, found = torch.optim.SGD(parameters, 0.1), []
    for step in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *[p.detach() for p in parameters]]


def compare(wrapper: Callable[[nn.Module], Any], **options: Any) -> ORTModule:
    """Trains a wrapped module through ORTModule and without, and compares."""
    plain = wrapper(a_module())
    ours = wrapper(a_module())
    model = ORTModule(ours, options=Options(engine="aten", **options))
    expected = trained(plain, [*plain.parameters()])
    for mine, its in zip(trained(model, [*model.parameters()]), expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME)
    return model


def test_data_parallel_runs_in_pytorch() -> None:
    with pytest.warns(UserWarning, match="ORTModule runs DataParallel in PyTorch") as warned:
        model = compare(nn.DataParallel)
    assert len(warned) == 1
    assert model.report.graph_calls == 0
    assert model.report.eager_calls == 3
    assert "put DistributedDataParallel around ORTModule" in model.report.reason


def test_without_a_fallback_data_parallel_is_an_error() -> None:
    model = ORTModule(nn.DataParallel(a_module()), options=Options(fallback="raise"))
    with pytest.raises(NotServed, match="copies its module to its devices"):
        model(torch.randn(5, 4))


def test_data_parallel_below_the_module_is_seen_where_it_copies() -> None:
    parallel = nn.DataParallel(a_module())
    parallel.device_ids = [0, 1]
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), parallel), options=Options(fallback="raise"))
    with pytest.raises(NotServed, match="1 is a DataParallel"):
        model(torch.randn(5, 4))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's own, of Dynamo
@pytest.mark.parametrize("wrapped", [nn.DataParallel, compiled])
def test_what_only_calls_a_module_below_is_in_the_graph(
    wrapped: Callable[[nn.Module], Any],
) -> None:
    def around(module: nn.Module) -> nn.Module:
        return nn.Sequential(module, wrapped(nn.Linear(3, 2)))

    model = compare(around, fallback="raise")
    assert model.report.graph_calls == 3


def test_data_parallel_around_runs_the_graph() -> None:
    inner = ORTModule(a_module(), options=Options(engine="aten", fallback="raise"))
    x = torch.randn(5, 4)
    torch.testing.assert_close(nn.DataParallel(inner)(x), inner.module(x), rtol=SAME, atol=SAME)
    assert inner.report.graph_calls == 1


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_data_parallel_inside_runs_in_pytorch() -> None:
    with pytest.warns(UserWarning, match="it goes around ORTModule"):
        model = compare(DistributedDataParallel)
    assert model.report.graph_calls == 0


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use .NO_SHARD.:UserWarning")
def test_fully_sharded_data_parallel_inside_runs_in_pytorch() -> None:
    device = torch.device("cpu")
    with pytest.warns(UserWarning, match="gathers its parameters"):
        model = compare(lambda module: FullyShardedDataParallel(module, device_id=device))
    assert model.report.graph_calls == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_script_module_runs_in_pytorch() -> None:
    with pytest.warns(UserWarning, match="runs TorchScript"):
        model = compare(lambda module: torch.jit.script(module))
    assert model.report.graph_calls == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_script_module_below_the_module_is_seen() -> None:
    module = nn.Sequential(nn.Linear(4, 4), torch.jit.script(a_module()))
    with pytest.warns(UserWarning, match="1 is a RecursiveScriptModule|1 is a ScriptModule"):
        assert ORTModule(module)(torch.ones(5, 4)).shape == (5, 3)


def test_a_compiled_module_runs_as_such() -> None:
    with pytest.warns(UserWarning, match=r"what torch\.compile has made"):
        model = compare(lambda module: torch.compile(module, backend="eager"))
    assert model.report.graph_calls == 0
    assert next(iter(model.state_dict())).startswith("_orig_mod.")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_module_runs_in_pytorch() -> None:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    module = quantize(a_module(), {nn.Linear}, dtype=torch.qint8)
    model = ORTModule(copy.deepcopy(module), options=Options(engine="aten"))
    x = torch.randn(5, 4)
    with pytest.warns(UserWarning, match="ORTModule runs Sequential in PyTorch"):
        assert torch.equal(model(x), module(x))


def test_a_wrapped_module_is_wrapped_once() -> None:
    inner = ORTModule(a_module())
    assert ORTModule(inner).module is inner.module


@pytest.mark.parametrize("replaced", ["hook", "pre-hook", "method"])
def test_what_comes_to_a_module_inside_of_a_wrapper_is_heard(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part's wrapper shows the part's children as its own, and not the part."""

    class Part(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    eager = nn.Sequential((Part if replaced == "method" else nn.Linear)(4, 4), nn.Linear(4, 3))
    inner = copy.deepcopy(eager)
    inner[0] = ORTModule(inner[0], options=Options(engine="aten"))
    model = ORTModule(inner, options=Options(engine="aten", certificate="off"))
    x = torch.randn(5, 4)
    for step in range(4):
        if step == 2:
            for part in (eager[0], inner[0].module):
                if replaced == "hook":
                    part.register_forward_hook(lambda m, args, out: out * 2)
                elif replaced == "pre-hook":
                    part.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
            if replaced == "method":
                monkeypatch.setattr(Part, "forward", lambda self, x: nn.Linear.forward(self, x))
        torch.testing.assert_close(model(x), eager(x))
    assert model.report.graph_calls >= 2


# -- what is set on the wrapper --------------------------------------------------------------------


def _set_parameter(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.full((3, 8), 0.25))


def _set_child(model: Any) -> None:
    model.added = nn.Linear(3, 3)
    model.added.requires_grad_(False)


def _replace_child(model: Any) -> None:
    torch.manual_seed(3)
    setattr(model, "2", nn.Linear(8, 3))


def _set_buffer(model: Any) -> None:
    model.scale = torch.full((3,), 2.0)


def _delete_buffer(model: Any) -> None:
    del model.scale


def _set_attribute(model: Any) -> None:
    model.factor = 3.0


def _set_function(model: Any) -> None:
    model.activation = torch.tanh


SETS = {
    "a parameter": _set_parameter,
    "a new child": _set_child,
    "another child": _replace_child,
    "a buffer": _set_buffer,
    "no buffer": _delete_buffer,
    "an attribute": _set_attribute,
    "a function": _set_function,
}


class Scaled(nn.Sequential):
    """Reads a buffer, an attribute and a function that may be there."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.register_buffer("scale", torch.ones(3))
        self.factor, self.activation = 1.0, torch.relu

    def forward(self, x: Tensor) -> Any:
        h = self.activation(self[0](x))
        y = self[2](h) * self.factor
        scale = getattr(self, "scale", None)
        y = y if scale is None else y * scale
        return y if getattr(self, "added", None) is None else y + 1


@pytest.mark.parametrize("name", SETS)
def test_what_is_set_on_the_wrapper_is_the_modules_and_the_next_call_has_it(name: str) -> None:
    plain, ours = Scaled(*a_module()), Scaled(*a_module())  # type: ignore[misc]
    model = ORTModule(ours, options=Options(engine="aten", fallback="raise"))
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), plain(x), rtol=SAME, atol=SAME)
    torch.manual_seed(1)
    SETS[name](model)
    torch.manual_seed(1)
    SETS[name](plain)
    torch.testing.assert_close(model(x), plain(x), rtol=SAME, atol=SAME)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.report.graph_calls == 2


def test_a_forward_that_is_set_on_the_wrapper_is_the_wrappers_own() -> None:
    """As accelerate wraps it: the module's own is what a graph is made of."""
    module = a_module()
    model: Any = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    own, x = model.forward, torch.randn(5, 4)
    model.forward = lambda given: own(given) * 2
    torch.testing.assert_close(model(x), module(x) * 2, rtol=SAME, atol=SAME)
    assert model.report.graph_calls == 1
    assert "forward" not in vars(module)
    del model.forward
    torch.testing.assert_close(model(x), module(x), rtol=SAME, atol=SAME)


def test_a_forward_that_is_set_on_the_module_is_captured() -> None:
    module: Any = a_module()
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    x = torch.randn(5, 4)
    expected = module(x)
    torch.testing.assert_close(model(x), expected, rtol=SAME, atol=SAME)
    own = module.forward
    module.forward = lambda given: own(given) * 2
    torch.testing.assert_close(model(x), expected * 2, rtol=SAME, atol=SAME)
