"""Scripts run as under Python itself, with old imports, from each of the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = [sys.executable, "-m", "ortrain.compat"]
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from ortrain.cli import main; sys.exit(main())",
    "run",
]
SHOW = """
import json, sys
import torch_ort.utils
from beside import VALUE
print(json.dumps([sys.argv[1:], __name__, __file__.rpartition("/")[2], __package__ or "", VALUE]))
"""


def run(
    command: list[str], *arguments: str, folder: Path, status: int = 0
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=100,
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "show.py").write_text(SHOW)
    (tmp_path / "scripts" / "beside.py").write_text("VALUE = 'beside the script'")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beside.py").write_text("VALUE = 'in the package'")
    for name in ("__main__", "show"):
        (package / f"{name}.py").write_text(SHOW.replace("from beside", "from .beside"))
    return tmp_path


@pytest.mark.parametrize("command", [MODULE, COMMAND], ids=["module", "command"])
def test_scripts_and_modules_run_as_under_python(command: list[str], folder: Path) -> None:
    given = ["--run", "-m", "two words", "-h"]
    tail = '"]'
    shown = run(command, "scripts/show.py", *given, folder=folder).stdout.strip()
    assert shown == (
        '[["--run", "-m", "two words", "-h"], "__main__", "show.py", "", "beside the script' + tail
    )
    shown = run(command, "-m", "package.show", *given, folder=folder).stdout.strip()
    assert shown.endswith('"__main__", "show.py", "package", "in the package' + tail)
    shown = run(command, "-m", "package", "x", folder=folder).stdout.strip()
    assert shown == '[["x"], "__main__", "__main__.py", "package", "in the package' + tail


ENDS = {
    "raise SystemExit(7)": (7, ""),
    "raise OSError(28, 'No space left')": (1, "Traceback"),
    "import ort_torch": (1, "No module named 'ort_torch'"),
    "def f(:": (1, "SyntaxError"),
    "import optimum.onnxruntime as o; o.ORTDiffusionPipeline": (1, "RemovedAttribute"),
}


def test_how_a_script_ends_is_its_own(folder: Path) -> None:
    for content, (status, told) in ENDS.items():
        (folder / "end.py").write_text(content)
        assert told in run(COMMAND, "end.py", folder=folder, status=status).stderr


def test_what_cannot_run_is_one_line(folder: Path) -> None:
    for command in (MODULE, COMMAND):
        for given, told in (
            (["nothing.py"], "nothing.py: No such file or directory"),
            (["-m", "nothing.at.all"], "there is no module 'nothing.at.all' to run"),
            (["-m"], "-m needs the name of a module"),
            (["-m", "torch_ort.optim"], "torch_ort.optim is no program that -m can run"),
            (["-x"], "'-x' is no option"),
            ([], "expected [-m module | script.py]"),
        ):
            lines = run(command, *given, folder=folder, status=2).stderr.splitlines()
            assert len(lines) == 1
            assert told in lines[0]


def test_old_programs_run(folder: Path) -> None:
    for program in (
        "torch_ort.configure",
        "onnxruntime.training.ortmodule.torch_cpp_extensions.install",
    ):
        done = run(MODULE, "-m", program, folder=folder)
        assert done.stdout == "ortrain has no extensions: nothing needs compiling\n"
    program = "onnxruntime.training.utils.hooks.merge_activation_summary"
    assert "--pt_dir" in run(MODULE, "-m", program, "--help", folder=folder).stdout


def test_processes_of_multiprocessing_know_the_old_names(folder: Path) -> None:
    script = """
import torch_ort.utils
def name(_): return torch_ort.__name__, __package__
if __name__ == "__main__":
    import multiprocessing
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(name, [1]))
"""
    (folder / "many.py").write_text(script)
    (folder / "package" / "many.py").write_text(f"from . import beside\n{script}")
    for given, package in ((["many.py"], None), (["-m", "package.many"], "package")):
        shown = run(MODULE, *given, folder=folder).stdout.splitlines()
        assert shown == [str([("torch_ort", package)])] * 3 or (
            package is None and {*shown} <= {"[('torch_ort', None)]", "[('torch_ort', '')]"}
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options", "count"),
    [
        (
            "torch.distributed.run",
            ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
            2,
        ),
        (
            "accelerate.commands.launch",
            ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"],
            1,
        ),
    ],
)
def test_it_is_what_a_launcher_launches(
    launcher: str, options: list[str], count: int, folder: Path
) -> None:
    (folder / "rank.py").write_text(
        "import os, sys, torch_ort.utils\n"
        # In one write: the ranks share a stream.
        "sys.stdout.write(f\"{sys.argv[1]} {os.environ.get('WORLD_SIZE', '1')}\\n\")"
    )
    command = [sys.executable, "-m", launcher, *options, "-m", "ortrain.compat"]
    done = run(command, "rank.py", "here", folder=folder)
    assert done.stdout.count(f"here {count}\n") == count
