"""The examples in the docs run as they stand, and the pages are found."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LEAST = {
    "classic": 2,
    "exported-models": 1,
    "generation": 1,
    "ondevice": 2,
    "ondevice-contract": 1,
    "optim": 4,
    "trainer": 2,
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {page: BLOCK.findall((DOCS / f"{page}.md").read_text()) for page in LEAST}
ALL = [(page, number) for page, blocks in BLOCKS.items() for number in range(len(blocks))]


@pytest.mark.parametrize("page", LEAST)
def test_the_page_has_examples(page: str) -> None:
    assert len(BLOCKS[page]) >= LEAST[page]


# Trainer pins memory by default, also where there is no accelerator.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize(("page", "number"), ALL)
def test_an_example_runs_by_itself(page: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[page][number])
    runpy.run_path(str(script))


# --- pages whose examples follow one another ----------------------------------------------------


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("docs/ortmodule", None),
        ("docs/libraries", None),
        ("docs/limits", None),
        ("docs/troubleshooting", None),
        ("docs/padding", None),
        ("docs/memory", None),
        ("docs/migration", None),
        ("docs/deploy", None),
        ("docs/quantization", None),
        ("README", 1),
    ],
)
def test_the_examples_of_a_page_run_one_after_another(
    page: str, count: int | None, tmp_path: Path
) -> None:
    blocks = BLOCK.findall((ROOT / f"{page}.md").read_text())[:count]
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script))
    # What a comment below a print says stands in what was printed.
    for told in re.findall(r"print\(.*\n *# (.*)", script.read_text()):
        assert told in printed.getvalue()


# --- messages -----------------------------------------------------------------------------------


def texts() -> str:
    """All strings of the package; a blank where a value stands in them."""
    found = []
    for path in (ROOT / "ortrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else " " for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_package() -> None:
    known, told, missing = texts(), 0, []
    for row in (DOCS / "troubleshooting.md").read_text().splitlines():
        cell = row.split("|")[1] if row.startswith("| `") else ""
        if "PyTorch's own" in row or re.search(r"[=(]", cell):
            continue
        for message in re.findall(r"`([^`]+)`", cell):
            # What changes from case to case stands in quotes, is a name with a dot, or is left out.
            fixed = re.split(r"'[^']*'|…|\S*\w\.\w\S*|\S+:\S+|\d+", message)
            longest = max((p.strip(" :,").removeprefix("the forward ") for p in fixed), key=len)
            words = longest.split()
            told += 1
            if " ".join(words[: max(2, len(words) // 2)]) not in known:
                missing.append(message)
    assert not missing
    assert told > 20


# --- links --------------------------------------------------------------------------------------

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), ROOT / "examples" / "README.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_links_every_page_of_the_docs() -> None:
    linked = {target for target, _ in LINK.findall((ROOT / "README.md").read_text())}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        other = page.parent / target if target else page
        assert other.exists(), f"{target} in {page.name}"
        if anchor:
            assert anchor in anchors(other), f"{target}#{anchor} in {page.name}"


def test_what_the_docs_say_of_files_is_there() -> None:
    for page in PAGES:
        for name in re.findall(r"`(\w[\w/]*/\w+\.py)`", page.read_text()):
            known = [ROOT / name, ROOT / "ortrain" / name, page.parent / name]
            assert any(path.exists() for path in known), f"{name} in {page.name}"
