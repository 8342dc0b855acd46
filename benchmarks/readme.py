"""Writes the figures of `results/*.json` into README.md, between its two `measured` marks.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def main() -> None:
    text = README.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    parts = [render() for render in (speed, start, memory, trainings, device) if _known(render)]
    README.write_text(f"{head}{BEGIN}\n{chr(10).join(parts)}{END}{tail}")


def speed() -> str:
    """The table of `step.py`."""
    found = _results("step")
    rows = [
        "One training step (forward, backward, and `AdamW(fused=True)` where named), medians in",
        "milliseconds, engines alternating in one process (torch.compile with eager in another).",
        _machine(found["machine"]),
        "",
        "| | eager fp32 | **ortrain** | speed-up | torch.compile fp32 | eager bf16 autocast |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in found["workloads"].values():
        known = result["contestants"]
        eager, ours = known["eager fp32"], known["ortrain default"]
        rows.append(
            f"| {result['title']} | {_ms(eager)} | **{_ms(ours)}** "
            f"| **{ours['paired_speedup']:.2f}x** | {_ms(known['torch.compile fp32'])} "
            f"| {_ms(known['eager bf16 autocast'])} |"
        )
    rows += [
        "",
        "ortrain computes in fp32, with eager's numbers; autocast computes in bf16. Eager's matrix",
        "products go through MKL, which is slow on AMD processors: on Intel expect a smaller gain.",
        "",
    ]
    return "\n".join(rows)


def start() -> str:
    """The figures of `first_step.py`, and of torch.compile's first step in `step.py`."""
    runs = _results("first_step")["workloads"]["bert"]
    cold, warm = (_middle(runs[k]) for k in ("no cache", "cache, later process"))
    known = _results("step")["workloads"]["bert"]["contestants"]
    compiled = known["torch.compile fp32"]["first_step_s"]
    return (
        f"The first finished step of the BERT above takes {cold:.1f} s as a graph, {warm:.1f} s in "
        f"a later process\nwith `Options(cache_dir=…)`, and {compiled:.0f} s with torch.compile.\n"
    )


def memory() -> str:
    """The figures of `memory.py`."""
    rows = _results("memory")["workloads"]["bert"]
    eager, ours = rows["eager"]["peak"], rows["default"]["peak"]
    graph, left = rows["graph"]["peak"], rows["graph"]["import_and_capture"]
    return (
        f"Peak memory of its steps: {graph / 2**20:.0f} MiB as a graph, {eager / 2**20:.0f} MiB "
        f"for eager, {ours / 2**20:.0f} MiB with the default\noptions, where eager runs first. "
        f"Imports and capture are {left / 2**20:.0f} MiB of ours.\n"
    )


def trainings() -> str:
    """The figures of `examples.py`."""
    gains = sorted(
        graph["samples_per_second"] / eager["samples_per_second"]
        for eager, graph in _results("examples")["examples"].values()
    )
    return (
        f"The {len(gains)} trainings of [examples/](examples/README.md), small models on short "
        f"texts, images and sounds, take\n{gains[0]:.2f} to {gains[-1]:.2f} times as many samples "
        f"a second as in PyTorch.\n"
    )


def device() -> str:
    """The figures of `ondevice.py`."""
    found = _results("ondevice")
    small, large = (found[name]["fused step"]["ratio"] for name in ("mlp", "encoder"))
    return (
        f"On a device, the fused step of a small perceptron takes {small:.2f} of eager PyTorch's "
        f"time, that of a MiniLM-shaped\nencoder {large:.2f}; from its files to the end of the "
        f"encoder's first step it is {found['first_step']['seconds']:.1f} s.\n"
    )


def _results(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text())
    return result


def _known(render: Any) -> bool:
    names = {
        speed: "step",
        start: "first_step",
        memory: "memory",
        trainings: "examples",
        device: "ondevice",
    }
    return (HERE / "results" / f"{names[render]}.json").exists()


def _machine(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cores']} cores of an {facts['processor']}, torch {facts['torch']} "
        f"(BLAS: {facts['torch_blas']}), onnxruntime {facts['onnxruntime']}."
    )


def _ms(row: dict[str, Any]) -> str:
    value = row["median_ms"]
    return f"{value:.0f}" if value >= 10 else f"{value:.3f}"


def _middle(rows: list[dict[str, Any]]) -> float:
    ordered = sorted(row["first_step"] for row in rows)
    return float(ordered[len(ordered) // 2])


if __name__ == "__main__":
    main()
