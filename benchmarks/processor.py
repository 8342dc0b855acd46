"""What the benchmarks run on: its facts, and the name of the folder that keeps its results."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
# What products run on; of the rest none has made a difference.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


def first_processor(text: str) -> dict[str, str]:
    """The fields of the first processor of /proc/cpuinfo."""
    block = text.partition("\n\n")[0]
    return {name.strip(): value.strip() for name, _, value in map(_parted, block.splitlines())}


def slug(fields: Mapping[str, str]) -> str:
    """Maker and generation of a processor, as far as its products differ: ``intel-xeon-amx``.

    Where the flags tell a generation they win over the numbers of family and model: a virtual
    machine of a Xeon with AMX was seen to call itself a Rocket Lake.

    Args:
        fields: of the processor in /proc/cpuinfo.
    """
    name, flags = fields.get("model name", ""), set(fields.get("flags", "").split())
    vendor = fields.get("vendor_id", "")
    if vendor == "AuthenticAMD" and "cpu family" in fields:
        zen = _zen(int(fields["cpu family"]), int(fields.get("model", 0)), flags)
        if zen:
            return f"amd-zen{zen}"
    if vendor == "GenuineIntel" and "Xeon" in name:
        if "amx_bf16" in flags:
            return "intel-xeon-amx-fp16" if "amx_fp16" in flags else "intel-xeon-amx"
        return "intel-xeon-" + ("avx512" if "avx512f" in flags else "avx2")
    return plain(re.sub(r"\((?:R|TM)\)|CPU|Processor|@.*| with .*|\d+-Core", " ", name))


def gpu_slug(name: str) -> str:
    """Maker and model of a GPU without its memory and form: ``nvidia-h100``."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(takewhile(lambda w: not re.fullmatch(r"\d+gb|hbm.*|sxm.*|pcie", w), words))


def plain(name: str) -> str:
    """A name as part of a path."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower())) or platform.machine()


def facts(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores, versions and the BLAS of the baseline; name and driver of a GPU."""
    import onnxruntime
    import torch

    fields = first_processor(CPUINFO.read_text()) if CPUINFO.exists() else {}
    configuration, parallel = torch.__config__.show(), torch.__config__.parallel_info()
    gpu = {} if device == "cpu" else _gpu(torch.version.cuda)
    return gpu | {
        "slug": gpu_slug(gpu["gpu"]) if gpu else slug(fields),
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "vendor": fields.get("vendor_id", "unknown"),
        "flags": [flag for flag in FLAGS if flag in fields.get("flags", "").split()],
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_blas": _found(r"BLAS_INFO=(\w+)", configuration),
        "mkl": _found(r"Math Kernel Library Version ([\d.]+)", configuration),
        "onednn": _found(r"MKL-DNN v([\d.]+)", configuration),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "parallel": _found(r"ATen parallel backend: (\w+)", parallel),
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
    }


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _zen(family: int, model: int, flags: set[str]) -> int:
    """The generation of AMD's cores; 0 for those before."""
    if family >= 26 or flags & {"avx_vnni", "avx512_vp2intersect"}:
        return 5
    if family == 25:
        return 4 if "avx512f" in flags else 3
    if family == 23:
        return 2 if model >= 0x30 else 1
    return 0


def _gpu(cuda: str | None) -> dict[str, str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    name, driver = found.stdout.splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver, "cuda": cuda or "none"}


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found.group(1) if found else "unknown"
