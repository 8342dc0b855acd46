"""What is loaded when it is first used, and the garbage collection around that."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest

from ortrain import lazy


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A package whose name ``thing`` is at home in a module of its own; collecting is on."""
    made, home = types.ModuleType("lazy_package"), types.ModuleType("lazy_home")
    home.thing = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lazy_package", made)
    monkeypatch.setitem(sys.modules, "lazy_home", home)
    was = gc.isenabled()
    gc.enable()
    yield made
    (gc.enable if was else gc.disable)()


def collections_of_a_load(many: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether collecting was on while it loaded, and, for each full collection, while that ran."""
    seen: list[bool] = []

    def load(name: str) -> object:
        seen.append(gc.isenabled())
        made = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        assert len(made) == 1000
        sys.modules[name].kept = made  # type: ignore[attr-defined]
        return sys.modules[name]

    monkeypatch.setattr(lazy, "MANY", many)
    monkeypatch.setattr(lazy.importlib, "import_module", load)
    monkeypatch.setattr(lazy.gc, "collect", lambda: seen.append(gc.isenabled()))
    gc.collect()
    seen.clear()
    lazy.attributes("lazy_package", {"thing": "lazy_home"})("thing")
    return seen


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("many", [100, 10_000_000])
def test_a_load_is_collected_once_behind_it_if_it_made_many_objects(
    enabled: bool, many: int, package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not enabled:
        gc.disable()
    expected = [False, False] if enabled and many == 100 else [False]
    assert collections_of_a_load(many, monkeypatch) == expected
    assert gc.isenabled() is enabled
    assert hasattr(package, "thing")


def test_a_name_that_is_missing_leaves_collecting_on(package: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        lazy.attributes("lazy_package", {"thing": "lazy_home"})("other")
    with pytest.raises(ImportError):
        lazy.attributes("lazy_package", {"thing": "no_such_home"})("thing")
    assert gc.isenabled()
