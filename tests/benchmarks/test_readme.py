"""The pages say what the files of results hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deployed
import pytest
import readme

MACHINE = {
    "cores": 2,
    "processor": "AMD EPYC",
    "torch": "2.13",
    "torch_blas": "mkl",
    "onnxruntime": "1.31",
}


@pytest.mark.parametrize(
    ("path", "render"),
    readme.PAGES,
    ids=["the project's", "the benchmarks'", "of quantization", "of fusions"],
)
def test_the_page_agrees_with_the_files(path: Path, render: Any) -> None:
    text = path.read_text()
    assert text == readme.replaced(text, render(readme.load())), "run benchmarks/readme.py"


def row(ms: float, ratio: float, same: float) -> dict[str, Any]:
    return {"median_ms": ms, "ratio": ratio, "ratio_same_precision": same, "first_step_s": 1.0}


def write(folder: Path, processor: str, benchmark: str, **content: Any) -> None:
    (folder / processor).mkdir(exist_ok=True)
    path = folder / processor / f"{benchmark}.json"
    path.write_text(json.dumps({"machine": MACHINE, **content}))


def steps(title: str, **contestants: Any) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in contestants.items()}
    return {"bert": {"title": title, "contestants": named}}


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    fp32 = {"eager": row(100, 1, 1), "auto": {**row(50, 0.5, 0.5), "ran": "eager (it won)"}}
    bf16 = {"eager_bf16": row(40, 0.4, 1), "auto_bf16": row(20, 0.2, 0.5)}
    left_out = {"aten": {"skipped": "ValueError: no"}}
    write(tmp_path, "amd-zen5", "step", workloads=steps("BERT", **fp32, **left_out))
    write(tmp_path, "intel-xeon-amx", "step", workloads=steps("BERT", **fp32, **bf16))
    write(tmp_path, "intel-xeon-avx2", "step", workloads=steps("BERT, padded", **fp32))
    write(tmp_path, "intel-xeon-avx512", "files", save={})
    return readme.load(tmp_path)


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_a_gain_is_over_the_fastest_of_pytorch_in_each_precision(tmp_path: Path) -> None:
    rows = {
        "eager": row(100, 1, 1),
        "compile": row(80, 0.8, 0.8),
        "eager-mkl-fast": row(60, 0.6, 0.6),
        "auto": row(40, 0.4, 0.4),
        "eager-bf16": row(90, 0.9, 1),
        "eager-bf16-products": row(50, 0.5, 0.6),
        "compile-bf16": {"skipped": "there is no g++"},
        "auto-bf16": row(50, 0.5, 0.5),
    }
    write(tmp_path, "amd-zen4", "step", workloads=steps("BERT", **rows))
    losing = {"eager": row(10, 1, 1), "auto": row(20, 2, 2)}
    write(tmp_path, "intel-xeon", "step", workloads={**steps("BERT", **losing)})
    write(tmp_path, "nvidia-h100", "step", workloads=steps("BERT", eager=row(1, 1, 1)))
    label = readme.MODELS["bert"]
    processors, kinds = ("`amd-zen4`", "`intel-xeon`"), ("fp32", "bf16", "best")
    columns = [f"{processor} {kind}" for processor in processors for kind in kinds]
    assert table(readme.gains(readme.load(tmp_path))) == [
        f"| a step of | {' | '.join(columns)} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {label} | 2.00x (1.50x) | 1.00x | 1.25x | 0.50x | – | – |",
    ]


def test_whole_runs_stand_below_the_steps(tmp_path: Path) -> None:
    eager, ours = {"0": 0.0, "5": 4.0, "60": 30.0}, {"0": 2.0, "5": 8.0, "60": 20.04}
    runs = {"eager": {"seconds": eager}, "auto": {"seconds": ours}}
    write(tmp_path, "amd-zen4", "whole_runs", workloads={"bert": runs})
    assert table(readme.gains(readme.load(tmp_path)))[2:] == [
        "| run of | 5 steps | 60 steps |",
        "| --- | --- | --- |",
        f"| {readme.MODELS['bert']}, `amd-zen4` | 4.0 → 8.0 | 30.0 → 20.0 |",
    ]


def test_a_table_has_a_column_for_each_processor_that_was_measured(
    results: dict[str, Any],
) -> None:
    lines = table(readme.contestants(results))
    assert lines[:3] == [
        "| BERT | `amd-zen5` | `intel-xeon-amx` |",
        "| --- | --- | --- |",
        "| `eager` | 100 ms, 1.00x | 100 ms, 1.00x |",
    ]
    assert "| BERT, padded | `intel-xeon-avx2` |" in lines


def test_contestants_have_both_ratios_and_reasons(results: dict[str, Any]) -> None:
    text = readme.contestants(results)
    assert "| `aten` | skipped: ValueError: no | – |" in text
    assert "| `auto` | 50 ms, 2.00x, in PyTorch |" in text
    assert "| `auto-bf16` | – | 20 ms, 5.00x, 2.00x |" in text


def test_every_benchmark_of_the_page_can_be_rendered(tmp_path: Path) -> None:
    run = {"samples_per_second": 2.0, "train_seconds": 3.0}
    faster = {"samples_per_second": 3.0, "train_seconds": 2.0}
    gained = {
        "fp32": {"eager": run, "ort": faster},
        "bf16": {"eager": run, "aten": {"skipped": ""}},
    }
    write(tmp_path, "amd-zen5", "examples", examples={"translation": gained, "other": gained})
    marks = {"60": {"ratio": 1.25}, "600": {"ratio": 0.5}}
    write(
        tmp_path, "amd-zen5", "trainer", precisions={"fp32": marks, "bf16": {"x": {"skipped": ""}}}
    )
    peaks = {"eager": {"peak": 2**20}, "aten": {"skipped": ""}, "auto": {"peak": 2**21}}
    write(tmp_path, "amd-zen5", "memory", workloads={"bert": peaks})
    costs = {"auto": {"share": 0.05}, "auto-bf16": {"skipped": ""}}
    write(tmp_path, "amd-zen5", "contest", workloads={"bert": costs})
    runs = {"no cache": [{"first_step": 3.0}], "cache, later process": [{"first_step": 2.0}]}
    write(tmp_path, "amd-zen5", "first_step", workloads={"bert": {"ort": runs}})
    lengths = {"captures": 1, "first_pass_s": 9.0, "ratio_fixed_length": 1.1, **row(5, 0.5, 0.5)}
    write(tmp_path, "amd-zen5", "lengths", title="lengths", contestants={"aten": lengths})
    curve = {"mean": 1e-3, "smoothed": 1e-4, "accuracies": [0.5]}
    write(tmp_path, "amd-zen5", "loss_curve", contestants={"aten-bf16": curve})
    words = {"eager, padded": {"words_per_second": 10.4}, "auto, padded": {"words_per_second": 20}}
    write(tmp_path, "amd-zen5", "batching", models={"classifier, fp32": words})
    results = readme.load(tmp_path)
    page = readme.contestants(results)
    for cell in (
        "1.50x to 1.50x (`ort`, 2 of them)",
        "60 steps 0.80x, 600 steps 2.00x",
        "`eager` 1 MiB, ortrain 2 MiB",
        "fp32 5.0%",
        "`ort` 3.0 s, 2.0 s with a full `cache_dir`",
        "eager, padded 10; auto, padded 20",
    ):
        assert f"| {cell} |" in page
    assert "| `aten` | 5.000 ms, 2.00x; 1.10 of one length's; first pass 9 s, 1 captures |" in page
    assert "| `aten-bf16` | 1.0e-03, smoothed 1.0e-04; 0.500 |" in page


def timed(ms: float, ratio: float) -> dict[str, float]:
    return {"median_ms": ms, "ratio": ratio, "ratio_eager": ratio / 2}


def answers(kernels: dict[str, int], **times: Any) -> dict[str, Any]:
    sizes = {name.replace("_x_", " x ").strip("_"): value for name, value in times.items()}
    told = {"bytes": 2_000_000, "size": 1.0, "agreement": 0.5, "accuracy": 0.25}
    return {**told, "kernels": kernels, **sizes}


def test_quantized_files_have_a_row_and_presets_of_one_file_share_it(tmp_path: Path) -> None:
    rows = {
        "float32": answers({"MatMul": 2}, _1_x_32=timed(4, 1)),
        "eager-bf16-weights": answers({}, _1_x_32=timed(6, 1.5)),
        "eager-bf16-autocast": answers({}, _1_x_32=timed(5, 1.25)),
        "torchao-int8": {"skipped": "torchao is not installed"},
        "dynamic-auto": answers({"DequantizeLinear": 3, "QGemm": 2}, _1_x_32=timed(2, 0.5)),
        "dynamic-x": {"same_file_as": "dynamic-auto"},
    }
    write(tmp_path, "amd-zen5", "quantization", **{"1 threads": rows})
    text = deployed.quantized(readme.load(tmp_path))
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| `amd-zen5`, 1 thread | size | stays | right | 1 x 32 | products run as |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `float32` | 2.0 MB | 50.0% | 25.0% | 4.0 ms, 1.00x, 2.00x | 2 MatMul |",
        "| `eager-bf16` (autocast) | 2.0 MB | 50.0% | 25.0% | 5.0 ms, 0.80x, 1.60x | – |",
        "| `torchao-int8` | skipped: torchao is not installed |  |  |  |  |",
        "| `dynamic-auto`, `dynamic-x` | 2.0 MB | 50.0% | 25.0% | 2.0 ms, 2.00x, 4.00x | 2 QGemm |",
    ]


def test_optimized_files_are_compared_with_the_exported_and_with_eager(tmp_path: Path) -> None:
    rows = {"as exported": {"8 x 128": timed(4, 1)}, "O2": {"8 x 128": timed(2, 0.5)}}
    write(tmp_path, "amd-zen5", "fusions", **{"2 threads": rows})
    text = deployed.optimized(readme.load(tmp_path))
    assert "| MiniLM classifier in onnxruntime, `amd-zen5`, 2 threads | 8 x 128 |" in text
    assert text.endswith("| `O2` | 2.0 ms, 2.00x, 4.00x |\n")
    assert deployed.optimized({}) == ""
