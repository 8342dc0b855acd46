"""What is released: one version, and archives that hold what they should."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hatchling.builders.plugin.interface import BuilderInterface
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import ortrain

ROOT = Path(__file__).parents[1]
CHANGES = (ROOT / "CHANGELOG.md").read_text()


def files_of(builder: type[BuilderInterface]) -> set[str]:
    """The files of the tree that an archive is made of."""
    made = builder(str(ROOT))
    return {each.relative_path for each in made.recurse_included_files()}


def test_there_is_one_version() -> None:
    assert ProjectMetadata(str(ROOT), PluginManager()).version == ortrain.__version__
    for name in ("package.json", "package-lock.json"):
        assert json.loads((ROOT / "js" / name).read_text())["version"] == ortrain.__version__
    newest = re.search(r"^## \[(.+?)\](?: - (.*))?$", CHANGES, re.MULTILINE)
    assert newest is not None
    assert newest[1] == ortrain.__version__
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", newest[2]), "a release has a date"


def test_a_wheel_holds_the_package_and_nothing_else() -> None:
    files = files_of(WheelBuilder)
    assert {name.split("/")[0] for name in files} == {"ortrain"}
    assert "ortrain/py.typed" in files
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "ortrain").rglob("*.py")}
    assert code == {name for name in files if name.endswith(".py")}
    assert not [name for name in files if "__pycache__" in name]


def test_a_source_archive_holds_what_tests_and_pages_read() -> None:
    """README, LICENSE and pyproject.toml are in every one."""
    files = files_of(SdistBuilder)
    folders = ("ortrain", "tests", "docs", "examples", "benchmarks", "js/src", "js/test")
    for folder in folders:
        found = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.[mpt][dys]")}
        assert found
        assert found <= files
    named = "CHANGELOG.md CONTRIBUTING.md SECURITY.md Makefile constraints.txt js/package.json"
    assert {*named.split()} <= files
    assert list((ROOT / "benchmarks" / "results").rglob("*.json"))
    assert any(name.startswith("benchmarks/results/") for name in files)
    assert not [name for name in files if name.startswith(("outputs/", "js/node_modules/"))]
