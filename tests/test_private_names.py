"""Private names of PyTorch and onnxruntime are in ``ortrain/pytorch/`` alone; nothing is patched.

What is read off the source: names that begin with an underscore and are none of the file's own,
assignments to attributes of other packages, and what looks into Python's own code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ortrain"
# Whose purpose they are: old interfaces, and the one way to give objects of libraries a method.
EXCEPTED = ("pytorch/", "compat/", "optim/method.py")
# Functions that are operators of ATen by their names, and checks that PyTorch documents.
OPERATORS = ("_foreach_", "_fused_", "_amp_", "_native_", "_check")
# Of Python itself, and of transformers' and Apex's interfaces that a subclass or a helper needs.
OTHERS = {
    "cli/signals.py": {"_thread"},
    "errors.py": {"_getframe"},
    "deploy/models/generating.py": {"_is_user_defined"},
    "optim/apex_amp.py": {"_has_overflow", "_overflow_buf"},
    "trainer/checks.py": {
        "_prepare_inputs", "_set_signature_columns_if_needed", "_signature_columns",
    },
}  # fmt: skip
# Names of PyTorch's that classes of ours have as well.
THEIRS = {
    "_schema", "_version", "_modules", "_parameters", "_buffers", "_backward_hooks",
    "_forward_hooks", "_cdata", "_C", "_ops", "_guards", "_sess", "_dynamo",
}  # fmt: skip
# Read for error texts, and to tell whether a function's `self` may be the module.
CODE = {"autodiff/registry.py", "frontend/watch.py", "assigned_forward.py"}


def files() -> list[str]:
    found = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    return sorted(name for name in found if not name.startswith(EXCEPTED))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def own_names(tree: ast.Module) -> set[str]:
    """What a file defines, or sets on its own objects."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and _root(node) in ("self", "cls"):
            found.add(node.attr)
    return found


def defined_by_us() -> set[str]:
    """Private members of our classes, which neighbours in a folder may read."""
    return {
        each
        for path in ROOT.rglob("*.py")
        for each in own_names(ast.parse(path.read_text()))
        if is_private(each)
    }


OURS = defined_by_us()


def packages(tree: ast.Module) -> set[str]:
    """The names under which a file knows what is not ours."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ortrain"):
            found |= {each.asname or each.name for each in node.names}
    return found


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    own, theirs = own_names(tree), packages(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ortrain"):
            whole = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            whole = [each.name for each in node.names]
        else:
            whole = []
        yield from ((node.lineno, p) for w in whole for p in w.split(".") if is_private(p))
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if "aten" in ast.unparse(node.value).split("."):
                continue  # an operator
            of_package = _root(node) in theirs
            known = own if node.attr in THEIRS else own | OURS
            if of_package or node.attr not in known:
                yield node.lineno, node.attr


def patches(tree: ast.Module) -> Iterator[int]:
    """Lines that assign to an attribute of another package, or delete one."""
    theirs = packages(tree) - {"sys"}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [
                e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])
            ]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and _root(node.func) in ("setattr", "delattr"):
            yield from [node.lineno] if _root(node.args[0]) in theirs else []
        yield from (
            t.lineno for t in targets if isinstance(t, ast.Attribute) and _root(t) in theirs
        )


@pytest.mark.parametrize("name", files())
def test_no_file_beside_has_private_names(name: str) -> None:
    known = OTHERS.get(name, set())
    tree = ast.parse((ROOT / name).read_text())
    found = [
        (line, each)
        for line, each in private_names(tree)
        if each not in known and not each.startswith(OPERATORS)
    ]
    assert not found


def test_nothing_of_another_package_is_replaced() -> None:
    found = {
        name: lines
        for name in files()
        if (lines := [*patches(ast.parse((ROOT / name).read_text()))])
    }
    assert not found


def test_pythons_own_code_is_read_where_it_is_told_alone() -> None:
    read = set()
    for path in ROOT.rglob("*.py"):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        imported = packages(tree)
        looks = "dis" in imported or any(
            isinstance(node, ast.Attribute) and node.attr in ("__code__", "get_referents")
            for node in ast.walk(tree)
        )
        if looks and not name.startswith(EXCEPTED):
            read.add(name)
    assert read <= CODE
