"""How far a module's state goes into packages that its code calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")

# Behind `widths` stands what no survey can see: a lock, and a generator that is under way.
PLAIN = """
import threading

LOCK = threading.Lock()
NUMBERS = iter(range(9))
SETTINGS = {"factor": 2}


def _guarded(size):
    with LOCK:
        return next(NUMBERS) * 0 + size


def widths(size):
    if size < 0:
        return _guarded(size)
    return size * SETTINGS["factor"]
"""
# What keeps results lies deeper than a survey of an installed package goes.
MEMOISED = """
import functools


@functools.lru_cache
def _kept(sizes):
    return [2 * size for size in sizes]


class Named:
    @functools.cache
    def kept(self, sizes):
        return {"twice": _kept(sizes)}


NAMED = Named()


def _deeper(sizes):
    return NAMED.kept(sizes)["twice"]


def widths(sizes):
    return _deeper(sizes)
"""
OF_TENSORS = """
import torch

SETTINGS = {"factor": 2}


def _factor():
    return SETTINGS["factor"]


def scaled(x):
    return torch.mul(x, _factor())
"""


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Callable[[str, str, bool], Any]]:
    """Writes a package, with or without what an installation leaves beside it, and imports it."""
    made: list[str] = []

    def make(name: str, text: str, installed: bool) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        if installed:
            folder = tmp_path / f"{name}-1.0.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (folder / "top_level.txt").write_text(f"{name}\n")
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    sys.path.insert(0, str(tmp_path))
    try:
        yield make
    finally:
        sys.path.remove(str(tmp_path))
        for name in made:
            sys.modules.pop(name, None)


class Calls(nn.Module):
    """A forward as a function of the module and of a package."""

    def __init__(self, function: Callable[[Any, Any, Tensor], Tensor], library: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        self.library = library

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.library, x)


def steps(model: Any, module: nn.Module, count: int = 3) -> list[str]:
    """What each training step ran on; each agrees with the module itself."""
    ran = []
    for step in range(count):
        x = torch.arange(8.0).reshape(2, 4) + step
        gradients = []
        for each in (module, model):
            module.zero_grad()
            each(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)
        ran.append(model.report.mode)
    return ran


def test_what_lies_deeper_in_an_installed_package_without_pytorch_is_no_state(
    package: Callable[[str, str, bool], Any],
) -> None:
    library = package("ortrain_test_plain", PLAIN, True)
    module = Calls(lambda m, lib, x: m.layer(x) * lib.widths(x.shape[1]), library)
    model = ORTModule(module, options=Options(engine="aten"))
    assert steps(model, module) == ["graph"] * 3


def test_what_its_functions_name_themselves_is(package: Callable[[str, str, bool], Any]) -> None:
    library = package("ortrain_test_named", PLAIN, True)
    module = Calls(lambda m, lib, x: m.layer(x) * lib.widths(x.shape[1]), library)
    model = ORTModule(module, options=Options(engine="aten"))
    assert steps(model, module) == ["graph"] * 3
    library.SETTINGS["factor"] = 5
    assert steps(model, module) == ["graph"] * 3
    assert model.report.captures == 2


def test_what_a_file_beside_the_script_has_and_no_call_reaches_is_no_obstacle(
    package: Callable[[str, str, bool], Any],
) -> None:
    library = package("ortrain_test_beside", PLAIN, False)
    module = Calls(lambda m, lib, x: m.layer(x) * lib.widths(x.shape[1]), library)
    model = ORTModule(module, options=Options(engine="aten"))
    assert steps(model, module) == ["graph"] * 3


def test_so_is_a_package_that_works_on_tensors(package: Callable[[str, str, bool], Any]) -> None:
    library = package("ortrain_test_of_tensors", OF_TENSORS, True)
    module = Calls(lambda m, lib, x: lib.scaled(m.layer(x)), library)
    model = ORTModule(module, options=Options(engine="aten"))
    assert steps(model, module) == ["graph"] * 3
    library.SETTINGS["factor"] = 7
    assert steps(model, module) == ["graph"] * 3
    assert model.report.captures == 2


@pytest.mark.parametrize("value", [False, True], ids=["sizes alone", "a value"])
def test_no_memo_keeps_sizes_of_a_trace(
    package: Callable[[str, str, bool], Any], value: bool
) -> None:
    library = package(f"ortrain_test_memoised_{value}", MEMOISED, True)

    def forward(m: Any, lib: Any, x: Tensor) -> Tensor:
        rows, columns = lib.widths(x.shape)
        result = m.layer(x).repeat(2, 2).reshape(rows, columns)
        return result * (2 if value and float(result.detach().sum()) > 0 else 1)  # type: ignore[no-any-return]

    module = Calls(forward, library)
    model = ORTModule(module, options=Options(engine="aten"))
    for rows in (2, 3, 5, 2, 3, 6):
        x = torch.arange(4.0 * rows).reshape(rows, 4)
        loss = model(x).square().sum()  # first, so that what the trace has kept is found
        loss.backward()
        assert all(type(size) is int for size in library.widths(torch.Size([rows, 4])))
        torch.testing.assert_close(loss, module(x).square().sum())
    assert model.report.mode == "eager"  # what a function keeps may be another than it would give
