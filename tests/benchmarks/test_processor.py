from __future__ import annotations

import processor
import pytest


def cpuinfo(**fields: object) -> str:
    first = "\n".join(f"{name.replace('_', ' ')}\t: {value}" for name, value in fields.items())
    return f"processor\t: 0\n{first}\n\nprocessor\t: 1\nmodel name\t: another\n"


def slug(vendor: str, name: str, family: int, model: int, flags: str) -> str:
    fields = {"cpu_family": family, "model": model, "model_name": name, "flags": flags}
    text = cpuinfo(**fields) + f"vendor_id\t: {vendor}\n"
    return processor.slug({**processor.first_processor(text), "vendor_id": vendor})


AVX512 = "avx2 avx512f avx512_bf16"


@pytest.mark.parametrize(
    ("name", "family", "model", "flags", "expected"),
    [
        ("AMD EPYC 9755", 26, 2, f"{AVX512} avx_vnni", "amd-zen5"),
        ("AMD EPYC", 25, 17, f"{AVX512} avx_vnni", "amd-zen5"),  # the hypervisor tells an older one
        ("AMD EPYC 9654", 25, 17, AVX512, "amd-zen4"),
        ("AMD EPYC 7763 64-Core Processor", 25, 1, "avx2", "amd-zen3"),
        ("AMD EPYC 7742 64-Core Processor", 23, 49, "avx2", "amd-zen2"),
        ("AMD EPYC 7601 32-Core Processor", 23, 1, "avx2", "amd-zen1"),
        ("AMD FX(tm)-8350 Eight-Core Processor", 21, 2, "avx", "amd-fx-tm-8350-eight-core"),
    ],
)
def test_an_amd_processor_is_named_by_its_cores(
    name: str, family: int, model: int, flags: str, expected: str
) -> None:
    assert slug("AuthenticAMD", name, family, model, flags) == expected


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("Intel(R) Xeon(R) Processor", f"{AVX512} amx_bf16 amx_tile", "intel-xeon-amx"),
        ("Intel(R) Xeon(R) 6980P", f"{AVX512} amx_bf16 amx_fp16", "intel-xeon-amx-fp16"),
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", AVX512, "intel-xeon-avx512"),
        ("Intel(R) Xeon(R) CPU E5-2676 v3 @ 2.40GHz", "avx2", "intel-xeon-avx2"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "avx2", "intel-core-i7-8650u"),
    ],
)
def test_an_intel_processor_is_named_by_what_its_products_run_on(
    name: str, flags: str, expected: str
) -> None:
    assert slug("GenuineIntel", name, 6, 167, flags) == expected


def test_a_processor_that_says_nothing_has_a_name_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert processor.slug({}) == "aarch64"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_a_gpu_is_named_without_its_memory(name: str, expected: str) -> None:
    assert processor.gpu_slug(name) == expected


def test_the_facts_name_the_baselines_products() -> None:
    facts = processor.facts()
    assert facts["torch_blas"] not in ("", "unknown")
    assert facts["onednn"].startswith("3.")
    assert facts["parallel"] == "OpenMP"
    assert facts["slug"] == processor.plain(facts["slug"])
