"""Each old name imports and is the thing that it should be; what is gone says so."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ortrain.compat.table import MODULES, PROGRAMS, REMOVED, explicit
from tests.compat.old_names import CLASSIC, GONE, OLD, pairs

ROOT = Path(__file__).parents[2]
HAS_CLASSIC = find_spec("ortrain.classic") is not None
# What the installed version of a package has itself.
ITS_OWN = {
    ("onnxruntime", "set_seed"),
    ("transformers.utils", "is_torch_tpu_available"),
    ("transformers.utils.import_utils", "is_torch_tpu_available"),
}
EXPLICIT = [(m, name, home) for m in MODULES for name, home in explicit(m).items()]

LOOK = """
import importlib, json, sys
{first}
seen = {{"early": sorted({{"torch", "transformers", "onnxruntime", "onnx"}} & {{*sys.modules}})}}
for module, name in json.loads(sys.argv[1]):
    key = f"{{module}}:{{name}}"
    try:
        space = {{}}
        exec(f"from {{module}} import {{name}} as found", space)
        found = space["found"]
        seen[key] = [getattr(found, "__module__", None) or getattr(found, "__name__", ""),
                     getattr(found, "__qualname__", type(found).__name__)]
    except Exception as error:
        seen[key] = [type(error).__name__, str(error)]
    try:
        value = getattr(importlib.import_module(module), name)
        seen[key].append("same" if value is found else "other")
    except Exception as error:
        seen[key].append(type(error).__name__)
print(json.dumps(seen))
"""


def look(first: str, names: list[tuple[str, str]], **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK.format(first=first), json.dumps(names)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )
    assert not done.returncode, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    table = [(module, name) for module, name, _ in EXPLICIT]
    gone = [(r.rpartition(".")[0], r.rpartition(".")[2]) for r in REMOVED]
    return look(
        "import ortrain.compat", [*table, *pairs(OLD), *pairs(CLASSIC), *pairs(GONE), *gone]
    )


def needs_classic(home: str) -> None:
    if home.startswith("ortrain.classic") and not HAS_CLASSIC:
        pytest.skip("ortrain.classic is not there")


def test_importing_it_loads_nothing_large(seen: dict[str, Any]) -> None:
    assert seen["early"] == []


@pytest.mark.parametrize(("module", "name", "home"), EXPLICIT)
def test_a_name_of_the_table_is_what_the_table_says(
    module: str, name: str, home: str, seen: dict[str, Any]
) -> None:
    needs_classic(home)
    where, what, same = seen[f"{module}:{name}"]
    assert same == "same", (where, what)
    if (module, name) in ITS_OWN:
        assert where.startswith(module.partition(".")[0])
        return
    target, _, new = home.partition(":")
    value = getattr(importlib.import_module(target), new)
    assert where == (getattr(value, "__module__", None) or getattr(value, "__name__", ""))
    assert what == getattr(value, "__qualname__", type(value).__name__)


@pytest.mark.parametrize(("module", "name"), pairs(OLD))
def test_an_import_of_old_scripts_resolves(module: str, name: str, seen: dict[str, Any]) -> None:
    where, what, same = seen[f"{module}:{name}"]
    assert same == "same", (where, what)


@pytest.mark.parametrize(("module", "name"), pairs(CLASSIC))
def test_an_import_of_scripts_of_2020_resolves(
    module: str, name: str, seen: dict[str, Any]
) -> None:
    needs_classic("ortrain.classic")
    where, what, same = seen[f"{module}:{name}"]
    assert same == "same", (where, what)


ALL_GONE = [*pairs(GONE), *[(r.rpartition(".")[0], r.rpartition(".")[2]) for r in REMOVED]]


@pytest.mark.parametrize(("module", "name"), ALL_GONE)
def test_what_is_gone_says_why_and_what_to_use(
    module: str, name: str, seen: dict[str, Any]
) -> None:
    kind, message, attribute = seen[f"{module}:{name}"]
    if module == "onnxruntime.capi.onnxruntime_pybind11_state" or module.endswith("_pybind_state"):
        # Python itself puts another message in the place of a module's own that is no package.
        assert kind == "ImportError"
    else:
        assert kind == "RemovedImport", message
        assert "is not in ortrain\n  because: " in message
        assert "\n  help:    " in message
    assert attribute in ("RemovedAttribute", "RemovedImport")


def test_the_programs_are_old_names_and_files_of_ortrain() -> None:
    for old, new in PROGRAMS.items():
        assert old in MODULES
        assert find_spec(new) is not None


def test_no_name_is_both_here_and_gone() -> None:
    here = {f"{module}.{name}" for module, name, _ in EXPLICIT} | {*MODULES}
    assert not here & {*REMOVED}


def test_the_page_on_migration_has_what_the_table_has() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    rows = re.findall(r"^\| `([\w.*]+)` \| `([\w.*]+)`", page, re.MULTILINE)
    moved = [(old, new) for old, new in rows if "." in old]
    assert len(moved) > 20
    for old, new in moved:
        module, _, name = old.rpartition(".")
        if name == "*":
            assert new.removesuffix(".*") in MODULES[module]
            continue
        home = explicit(module)[name].replace(":", ".")
        # Who changes the import takes ortrain's own, not the one that knows scripts of then.
        changed = home.replace(".compat.trainers", "").replace(".compat.artifacts", ".ondevice")
        assert new in (home, changed)


# --- without ortrain.compat, and beside installed packages --------------------------------------


def test_without_it_nothing_is_visible() -> None:
    found = look(
        "import ortrain", [("torch_ort", "ORTModule"), ("optimum.onnxruntime", "ORTTrainer")]
    )
    kinds = {each[0] for key, each in found.items() if key != "early"}
    assert kinds == {"ModuleNotFoundError"}


@pytest.mark.parametrize("first", ["import ortrain.compat", "import {0}, ortrain.compat"])
def test_an_installed_package_keeps_all_that_it_has(first: str, tmp_path: Path) -> None:
    files = {
        "optimum/__init__.py": "",
        "optimum/onnxruntime/__init__.py": "class ORTModelForCausalLM: pass\n"
        "class ORTQuantizer: pass\n",
        "optimum/onnxruntime/configuration.py": "class AutoQuantizationConfig: pass\n",
        "onnxruntime/__init__.py": "def set_seed(n): return 'its own'\n__version__ = '0'\n",
        "onnxruntime/training/__init__.py": "def __getattr__(name):\n"
        "    if name == 'lazy': return 'its own'\n"
        "    raise AttributeError(name)\n",
        "onnxruntime/training/ortmodule/__init__.py": "class ORTModule: pass\n",
        "torch_ort/__init__.py": "import sys, types\n"
        "class Lazy(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        if name == 'ORTModule': return int\n"
        "        raise AttributeError(name)\n"
        "lazy = Lazy(__name__); lazy.__path__ = __path__; lazy.__spec__ = __spec__\n"
        "sys.modules[__name__] = lazy\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    theirs = {
        "optimum.onnxruntime:ORTModelForCausalLM": "optimum.onnxruntime",
        "optimum.onnxruntime:ORTQuantizer": "optimum.onnxruntime",
        "optimum.onnxruntime.configuration:AutoQuantizationConfig": (
            "optimum.onnxruntime.configuration"
        ),
        "onnxruntime:set_seed": "onnxruntime",
        "onnxruntime.training:lazy": "",
        "onnxruntime.training.ortmodule:ORTModule": "onnxruntime.training.ortmodule",
        "torch_ort:ORTModule": "builtins",
    }
    ours = {
        "onnxruntime.training.ortmodule:DebugOptions": "ortrain.config",
        "onnxruntime.training.ortmodule.options:LogLevel": "ortrain.config",
        "onnxruntime.training.optim.fused_adam:AdamWMode": "ortrain.optim.adam_mode",
        "torch_ort:LogLevel": "ortrain.config",
        "torch_ort.optim:AdamWMode": "ortrain.optim.adam_mode",
    }
    gone = "optimum.onnxruntime:ORTDiffusionPipeline"
    names = [tuple(key.split(":")) for key in (*theirs, *ours, gone)]
    packages = "onnxruntime.training.ortmodule, optimum.onnxruntime, torch_ort"
    # onnxruntime itself is a stub there, so that nothing of ortrain may need the real one.
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    found = look(first.format(packages), names, PYTHONPATH=path)
    for key, where in {**theirs, **ours}.items():
        assert found[key][0] == where or where == "", (key, found[key])
        assert found[key][2] == "same"
    assert found[gone][0] == "RemovedImport"
    for name, content in files.items():
        assert (tmp_path / name).read_text() == content


def test_modules_keep_their_own_loaders_and_lists() -> None:
    script = (
        "import ortrain.compat, importlib.util, onnxruntime, inspect, torch_ort, pkgutil\n"
        "assert 'class' in inspect.getsource(onnxruntime.capi.onnxruntime_inference_collection)\n"
        "assert type(onnxruntime.__spec__.loader).__name__ == 'SourceFileLoader'\n"
        "assert type(onnxruntime.__loader__).__name__ == 'SourceFileLoader'\n"
        "assert 'ORTModule' in dir(torch_ort) and 'ORTModule' in torch_ort.__all__\n"
        "assert not hasattr(torch_ort, '__file__') and not hasattr(torch_ort, 'ORTMdule')\n"
        "assert importlib.util.find_spec('torch_ort.nothing') is None\n"
        "assert hasattr(onnxruntime, 'training') and not hasattr(onnxruntime, 'trainig')\n"
        "ortrain.compat.install()\n"
        "import sys\n"
        "kinds = [type(f).__module__ for f in sys.meta_path]\n"
        "assert kinds.count('ortrain.compat.finder') == 1, kinds\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
