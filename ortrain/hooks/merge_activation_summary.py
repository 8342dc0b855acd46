"""Puts two sets of activation statistics side by side: a file for each step, in one order.

::

    python -m ortrain.hooks.merge_activation_summary --pt_dir a --ort_dir b --output_dir merged

``merged/merge_pt`` and ``merged/merge_ort`` then have files of equal names whose lines a comparison
of files aligns.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ortrain.errors import InputError
from ortrain.files.names import leads_out
from ortrain.files.regular import expect_regular
from ortrain.hooks.statistics import ORDER


def merge(pt_dir: Path, ort_dir: Path, output_dir: Path) -> list[str]:
    """Writes the merged files; names of what only the first set has.

    Args:
        pt_dir: statistics of the run whose order counts.
        ort_dir: of the run to compare with it.
        output_dir: gets the folders ``merge_pt`` and ``merge_ort``.

    Raises:
        InputError: a folder has no statistics.
    """
    orders = {step.name: _order(step) for step in _steps(pt_dir)}
    first = next(iter(orders.values()))
    missing = []
    for source, name in ((pt_dir, "merge_pt"), (ort_dir, "merge_ort")):
        target = output_dir / name
        target.mkdir(parents=True, exist_ok=True)
        for step in _steps(source):
            texts = []
            for each in orders.get(step.name, first):
                if (step / each).exists():
                    texts.append(expect_regular(step / each).read_text(encoding="utf-8"))
                else:
                    missing.append(f"{source.name}/{step.name}/{each}")
            (target / f"{step.name}_.txt").write_text("\n".join(texts), encoding="utf-8")
    return missing


def _steps(folder: Path) -> list[Path]:
    """The folders of the steps, by their numbers."""
    found = [step for step in folder.glob("step_*") if (step / ORDER).is_file()]
    if not found:
        raise InputError(
            f"{str(folder)!r} has no statistics of activations",
            help="it is the output_dir of a StatisticsSubscriber",
        )
    return sorted(found, key=lambda step: int(step.name.removeprefix("step_")))


def _order(step: Path) -> list[str]:
    """The names of a step's files, each once."""
    names = dict.fromkeys((step / ORDER).read_text(encoding="utf-8").split("\n")[:-1])
    if out := [name for name in names if leads_out(name)]:
        raise InputError(f"{step / ORDER} names {out[0]!r}, which is not in its folder")
    return list(names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ortrain.hooks.merge_activation_summary",
        description="Merge two sets of activation statistics into one file for each step.",
    )
    for name, text in (
        ("pt_dir", "statistics of the run in PyTorch"),
        ("ort_dir", "statistics of the other run"),
        ("output_dir", "the folder to write"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    parser.add_argument("--overwrite", action="store_true", help="write over what is there")
    options = parser.parse_args(arguments)
    folder: Path = options.output_dir
    if folder.exists() and not options.overwrite:
        print(f"{folder} is there already; give --overwrite, or another one", file=sys.stderr)
        return 2
    for name in ("merge_pt", "merge_ort"):
        shutil.rmtree(folder / name, ignore_errors=True)
    try:
        missing = merge(options.pt_dir, options.ort_dir, folder)
    except InputError as error:
        print(f"{error.what}; {error.help}", file=sys.stderr)
        return 2
    for name in missing:
        print(f"not there: {name}")
    print(f"merged into {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
