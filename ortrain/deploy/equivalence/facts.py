"""What a model is made of, and what it ran on: files, operators, versions, processor."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from pathlib import Path

import onnxruntime

from ortrain import __version__
from ortrain.cpuinfo import cpuinfo
from ortrain.deploy.model_folder import ModelFolder, external_files_of, load_model
from ortrain.files.checksums import sha256


def files_of(folder: ModelFolder) -> tuple[dict[str, int], dict[str, str], dict[str, int]]:
    """Bytes and checksums of a model's files, by name, and how many nodes each operator has.

    Raises:
        InputError: a file is no ONNX model, is damaged, or its weights are not there.
    """
    operators: Counter[str] = Counter()
    paths: set[Path] = set()
    for name in folder.files:
        model = load_model(folder.path / name)
        paths |= {folder.path / name, *external_files_of(model)}
        for graph in model.graphs():
            operators.update(_name(node.domain, node.op_type) for node in graph)
        for function in model.functions.values():
            operators.update(_name(node.domain, node.op_type) for node in function)
    names = {os.fspath(path.relative_to(folder.path)): path for path in sorted(paths)}
    sizes = {name: path.stat().st_size for name, path in names.items()}
    return sizes, {name: sha256(path) for name, path in names.items()}, dict(operators)


def environment(provider: str, threads: int | None) -> dict[str, str]:
    """Versions and what the processor is called."""
    found = {"ortrain": __version__, "onnxruntime": onnxruntime.__version__}
    for package in ("onnx", "onnx-ir", "numpy"):
        found[package] = _version(package)
    return {
        **found,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": str(os.cpu_count() or "unknown"),
        "provider": provider,
        "threads": "as many as onnxruntime takes" if threads is None else str(threads),
    }


def processor() -> str:
    """The processor's name."""
    named = cpuinfo().get("model name")
    return named or platform.processor() or platform.machine() or "unknown"


def _name(domain: str, op_type: str) -> str:
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"
