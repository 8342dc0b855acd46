"""Products in bfloat16 are on while a program runs, and never outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.errors import ExecutionError
from ortrain.runtime import reduced
from ortrain.runtime.aten import AtenExecutor, executor
from ortrain.runtime.reduced import has_effect, reduced_products, reduced_products_asked_for

PRODUCTS = Options(engine="aten", fallback="raise", precision="bf16-products")
OPERATORS = ("matmul", "conv", "rnn")


def setting() -> list[str]:
    return [torch._C._get_fp32_precision_getter("mkldnn", each) for each in OPERATORS]


def put(operator: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter("mkldnn", operator, precision)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test sets is gone behind it, and nothing else was set."""
    assert setting() == ["none"] * 3
    yield
    assert reduced._SETTING.users == 0
    for operator in ("all", *OPERATORS):
        put(operator, "none")


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A CPU that multiplies so; the settings that each run of a program met."""
    monkeypatch.setattr(executor, "has_effect", lambda: True)
    seen: list[list[str]] = []
    enter = reduced._SETTING.enter

    def noted() -> None:
        enter()
        seen.append(setting())

    monkeypatch.setattr(reduced._SETTING, "enter", noted)
    return seen


@pytest.mark.parametrize("own", ["none", "ieee", "bf16", "tf32"])
@pytest.mark.parametrize("operator", ["all", *OPERATORS])
def test_the_users_setting_is_put_back(operator: str, own: str) -> None:
    put(operator, own)
    before = setting()
    with reduced_products():
        assert setting() == ["bf16"] * 3
        with reduced_products():
            assert setting() == ["bf16"] * 3
        assert setting() == ["bf16"] * 3
    assert setting() == before
    with pytest.raises(ZeroDivisionError), reduced_products():
        raise ZeroDivisionError
    assert setting() == before
    # What followed the setting for all operators still does.
    put("all", "tf32")
    expected = ["tf32"] * 3
    if operator != "all" and own != "none":
        expected[OPERATORS.index(operator)] = own
    assert setting() == expected


def test_threads_that_overlap_put_it_back_together() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with reduced_products():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with reduced_products():
        thread.start()
        assert entered.wait(10)
    assert setting() == ["bf16"] * 3  # the other one's
    left.set()
    thread.join(10)
    assert setting() == ["none"] * 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def test_it_is_on_in_forward_and_backward_and_off_between(able: list[list[str]]) -> None:
    model = ORTModule(network(), options=PRODUCTS)
    between: list[Any] = []
    for step in range(3):
        del able[:]
        loss = model(torch.randn(8, 2, 6, 6)).square().mean()
        between.append(setting())
        forwards = len(able)
        loss.backward()
        between.append(setting())
        assert forwards >= 1
        assert len(able) > forwards
        assert all(each == ["bf16"] * 3 for each in able), step
    assert all(each == ["none"] * 3 for each in between)
    assert model.report.engine == "aten on cpu, float32 multiplied in bfloat16"
    assert model.report.certificate
    assert model.report.eager_calls == 0


def test_it_is_off_behind_a_program_that_fails(able: list[list[str]]) -> None:
    model = ORTModule(network(), options=PRODUCTS)
    model(torch.randn(8, 2, 6, 6))
    with reduced_products_asked_for():
        made = AtenExecutor()
    plan = model._runner.graphs.last.graphs[-1].step.plan
    compiled = made.compile(plan.lowered[0])
    assert compiled.reduced
    with pytest.raises(ExecutionError):
        compiled.run_values([torch.zeros(1)] * len(compiled.input_names))
    assert setting() == ["none"] * 3


def test_without_being_asked_for_it_is_never_on(able: list[list[str]]) -> None:
    model = ORTModule(network(), options=Options(engine="aten", fallback="raise"))
    model(torch.randn(8, 2, 6, 6)).square().mean().backward()
    assert not able
    assert model.report.engine == "aten on cpu"


def test_pytorch_in_its_place_multiplies_float32(able: list[list[str]]) -> None:
    model = ORTModule(network(), options=Options(engine="torch", precision="bf16-products"))
    model(torch.randn(8, 2, 6, 6)).square().mean().backward()
    assert not able


@pytest.mark.skipif(has_effect(), reason="this CPU multiplies so")
def test_a_cpu_without_it_computes_as_without_the_option() -> None:
    results = []
    for options in (PRODUCTS, Options(engine="aten", fallback="raise")):
        model = ORTModule(network(), options=options)
        loss = model(torch.ones(8, 2, 6, 6)).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))
    with reduced_products_asked_for():
        assert str(AtenExecutor()).endswith("multiplied as such: bfloat16 takes a CPU with AMX")


@pytest.mark.skipif(not has_effect(), reason="this CPU has no AMX")
def test_products_are_as_far_off_as_operands_of_eight_bits() -> None:
    x = torch.randn(256, 256)
    layer = nn.Linear(256, 256)
    graph = ORTModule(layer, options=PRODUCTS)
    found, exact = graph(x), layer.double()(x.double())
    apart = float((found - exact).norm() / exact.norm())
    assert 1e-4 < apart < 1e-2


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
@pytest.mark.parametrize("place", ["engine", "inference"])
def test_an_engine_without_it_is_refused(engine: Any, place: str) -> None:
    with pytest.raises(ValueError, match=r"bf16-products.*multiplies float32 as it is"):
        Options(**{"engine": "aten", place: engine, "precision": "bf16-products"})
