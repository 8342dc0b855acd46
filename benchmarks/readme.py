"""Writes the figures of `results/` into their pages, between the two `measured` marks.

    python benchmarks/readme.py

The project's README has what is gained over the best of PyTorch. That of `benchmarks/` has a table
for each workload, with all contestants and a column for each processor. Tables of deployed files
are in `docs/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import deployed
from first_step import middle
from measurement import RESULTS

from examples import gain

HERE = Path(__file__).parent
README, PAGE = HERE.parent / "README.md", HERE / "README.md"
QUANTIZATION, FUSIONS = (
    HERE.parent / "docs" / f"{name}.md" for name in ("quantization", "fusions")
)
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
# Our engines where no contest decides; told is the first of these that was measured.
FORCED = ("aten", "ort")

Found = dict[str, Any]
"""The files of one processor, by benchmark."""
Cell = Callable[[Found], str]
"""What a processor has in a row; empty where it was not measured."""


def main() -> None:
    results = load()
    for path, render in PAGES:
        path.write_text(replaced(path.read_text(), render(results)))


def load(folder: Path = RESULTS) -> dict[str, Found]:
    """Everything that was measured, by processor."""
    results: dict[str, Found] = {}
    for path in sorted(folder.glob("*/*.json")):
        results.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    return results


def replaced(text: str, part: str) -> str:
    """A page with this between its marks."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{part}{END}{tail}"


# --- the project's page ---------------------------------------------------------------------------

# What users have for nothing, by precision; beside it what they have where MKL is told of another
# processor.
FREE = {
    "fp32": ("eager", "compile"),
    "bf16": ("eager-bf16", "compile-bf16", "eager-bf16-products"),
}
SPECIAL = "eager-mkl-fast"
DEFAULT = {"fp32": "auto", "bf16": "auto-bf16"}
MODELS = {
    "bert": "BERT-base, 4 layers, 8 x 128, padded",
    "minilm": "MiniLM, 32 x 48, padded",
    "longtext": "BERT-base, 4 layers, 2 x 512, padded",
    "bert-full": "BERT-base, 4 layers, 8 x 128, no padding",
    "prompts": "GPT-2, 4 layers, 8 x 128, half of the tokens without a label",
    "gpt2": "GPT-2, 4 layers, 4 x 128, no padding",
    "resnet": "ResNet-18, 16 images",
    "lstm": "LSTM, 32 x 40",
    "mlp": "MLP of width 64",
}


def gains(results: Mapping[str, Found]) -> str:
    """The small tables of the project's page: of steps, and of whole runs."""
    measured = {name: found for name, found in results.items() if _gained(found)}
    columns = [f"`{name}` {column}" for name in measured for column in (*FREE, "best")]
    lines = [_row("a step of", columns), _row("---", ["---"] * len(columns))]
    for model, label in MODELS.items():
        cells = [cell for found in measured.values() for cell in steps_gained(found, model)]
        if any(cells):
            lines.append(_row(label, (cell or "–" for cell in cells)))
    text = [
        "How many times as fast a step is as in **the faster of eager and `torch.compile`** in the",
        "same precision. A step is forward, backward and `AdamW(fused=True)`. ortrain has its",
        "default options. All was measured on two cores; more cores were not.",
        "",
        "- bf16: under autocast or, if that is faster, fp32 with matrix products in bf16.",
        "- `best`: each side in its own fastest precision.",
        "- In brackets: on AMD processors PyTorch's fp32 is slow, since MKL takes a slow path. The",
        "  figure in brackets is against PyTorch on the fast path, which a setting brings about",
        "  ([how](benchmarks/README.md#contestants)). It is missing where it was not measured.",
        "- padded: a row has a quarter to all of its places filled, 62 % on average.",
        "- Below 1 ortrain is slower: its own Python around a step of less than a millisecond.",
        "",
        *lines,
        "",
    ]
    whole = whole_runs(results)
    if whole:
        text += [
            "Whole runs in fp32: seconds in eager PyTorch (MKL on its slow path) → seconds with",
            "ortrain and its default options, its imports, tracing and timing",
            "included.",
            "",
            *whole,
            "",
        ]
    text += [
        *(f"- {machine(name, results[name])}" for name in measured),
        "",
        "More models and contestants, memory, trainers, GPUs and devices:",
        "[benchmarks/](benchmarks/README.md).",
        "",
    ]
    return "\n".join(text)


def _gained(found: Found) -> bool:
    """Whether the default options were measured there."""
    workloads = found.get("step", {}).get("workloads", {}).values()
    return any(DEFAULT["fp32"] in each["contestants"] for each in workloads)


def steps_gained(found: Found, model: str) -> list[str]:
    """How many times as fast as PyTorch ortrain is, by precision and of the fastest of both."""
    rows = found.get("step", {}).get("workloads", {}).get(model, {}).get("contestants", {})
    rows = {name: row["ratio"] for name, row in rows.items() if "skipped" not in row}
    free = {
        precision: min((rows[name] for name in names if name in rows), default=None)
        for precision, names in FREE.items()
    }
    cells = []
    for precision, name in DEFAULT.items():
        best = free[precision]
        if name not in rows or best is None:
            cells.append("")
            continue
        cell = f"{best / rows[name]:.2f}x"
        if precision == "fp32" and SPECIAL in rows:
            cell += f" ({min(rows[SPECIAL], best) / rows[name]:.2f}x)"
        cells.append(cell)
    ours = [rows[name] for name in DEFAULT.values() if name in rows]
    theirs = [best for best in free.values() if best is not None]
    return [*cells, f"{min(theirs) / min(ours):.2f}x" if all(cells) else ""]


def whole_runs(results: Mapping[str, Found]) -> list[str]:
    """The table of `whole_runs.py`: a row for each model and processor."""
    rows: dict[str, dict[str, str]] = {}
    for name, found in results.items():
        for model, contestants in found.get("whole_runs", {}).get("workloads", {}).items():
            eager, ours = (contestants[each]["seconds"] for each in ("eager", "auto"))
            cells = {step: f"{eager[step]:.1f} → {ours[step]:.1f}" for step in ours if step != "0"}
            rows[f"{MODELS[model]}, `{name}`"] = cells
    if not rows:
        return []
    steps = [*next(iter(rows.values()))]
    return [
        _row("run of", (f"{step} steps" for step in steps)),
        _row("---", ["---"] * len(steps)),
        *(_row(label, row.values()) for label, row in rows.items()),
    ]


# --- the page of the benchmarks: other figures ----------------------------------------------------


def others(results: Mapping[str, Found]) -> str:
    """A row for each thing measured that is no step of a model, a column for each processor."""
    rows: dict[str, Cell] = {}
    rows["first finished step of the BERT"] = start
    rows["what finding the engine costs, of 200 of its steps"] = contest
    rows["peak memory of its steps"] = memory
    for precision in FREE:
        rows[f"trainings of [examples/](../examples/README.md), {precision}"] = trainings(precision)
        rows[f"`ORTTrainer` in place of `Trainer`, MiniLM-L6 shape, {precision}"] = trainer(
            precision
        )
    for model in dict.fromkeys(name for found in results.values() for name in batched(found)):
        rows[f"real words a second: {model}"] = words(model)
    rows["fused step on a device, of eager's time"] = device
    rows["first step of the encoder from its files"] = device_start
    return table("", rows, results)[0]


def batched(found: Found) -> dict[str, Any]:
    """What `batching.py` has measured."""
    rows: dict[str, Any] = found.get("batching", {}).get("models", {})
    return rows


def words(model: str) -> Cell:
    """The figures of `batching.py`."""

    def cell(found: Found) -> str:
        rows = batched(found).get(model, {})
        return "; ".join(f"{name} {row['words_per_second']:.0f}" for name, row in rows.items())

    return cell


def start(found: Found) -> str:
    """The figures of `first_step.py`, and of torch.compile's first step in `step.py`."""
    parts = []
    for name, runs in found.get("first_step", {}).get("workloads", {}).get("bert", {}).items():
        if "skipped" not in runs:
            cold, warm = (middle(runs[k]) for k in ("no cache", "cache, later process"))
            parts.append(
                f"`{name}` {cold['first_step']:.1f} s, "
                f"{warm['first_step']:.1f} s with a full `cache_dir`"
            )
    steps = found.get("step", {}).get("workloads", {}).get("bert", {}).get("contestants", {})
    if "first_step_s" in steps.get("compile", {}):
        parts.append(f"compile {steps['compile']['first_step_s']:.0f} s")
    return ", ".join(parts)


def contest(found: Found) -> str:
    """The figures of `contest.py`."""
    rows = found.get("contest", {}).get("workloads", {}).get("bert", {})
    precisions = {"auto": "fp32", "auto-bf16": "bf16"}
    return ", ".join(
        f"{precisions[name]} {row['share']:.1%}"
        for name, row in rows.items()
        if "skipped" not in row
    )


def memory(found: Found) -> str:
    """The figures of `memory.py`."""
    rows = found.get("memory", {}).get("workloads", {}).get("bert", {})
    names = {name: "ortrain" if name == "auto" else f"`{name}`" for name in rows}
    peaks = [
        f"{names[name]} {row['peak'] / 2**20:.0f} MiB"
        for name, row in rows.items()
        if "skipped" not in row
    ]
    return ", ".join(peaks)


def trainings(precision: str) -> Cell:
    """The least and the largest gain of `examples.py`."""

    def cell(found: Found) -> str:
        every = found.get("examples", {}).get("examples", {}).values()
        rows = [by_precision.get(precision, {}) for by_precision in every]
        for name in FORCED:
            gains = [value for row in rows if (value := gain(row, name)) is not None]
            if gains:
                return f"{min(gains):.2f}x to {max(gains):.2f}x (`{name}`, {len(gains)} of them)"
        return ""

    return cell


def trainer(precision: str) -> Cell:
    """The whole trainings of `trainer.py`."""

    def cell(found: Found) -> str:
        rows = found.get("trainer", {}).get("precisions", {}).get(precision, {})
        parts = [
            f"{steps} steps {1 / row['ratio']:.2f}x"
            for steps, row in rows.items()
            if "skipped" not in row
        ]
        return ", ".join(parts)

    return cell


def padded(results: Mapping[str, Found]) -> list[str]:
    """What `padding.py` has measured anywhere: model, padding and precision."""
    return [*dict.fromkeys(name for found in results.values() for name in settings(found))]


def settings(found: Found) -> dict[str, Any]:
    rows: dict[str, Any] = found.get("padding", {}).get("settings", {})
    return rows


def device(found: Found) -> str:
    """The fused steps of `ondevice.py`."""
    rows = found.get("ondevice")
    if rows is None:
        return ""
    small, large = (rows[name]["fused step"]["ratio"] for name in ("mlp", "encoder"))
    return f"perceptron {small:.2f}, MiniLM-shaped encoder {large:.2f}"


def device_start(found: Found) -> str:
    """The first step of `ondevice.py`."""
    row = found.get("ondevice", {}).get("first_step")
    return f"{row['seconds']:.1f} s" if row else ""


# --- the page of the benchmarks -------------------------------------------------------------------


def contestants(results: Mapping[str, Found]) -> str:
    """A table for each workload: a row for each contestant, a column for each processor."""
    parts = []
    for title in titles(results):
        every = (workload(found, title) for found in results.values())
        names = dict.fromkeys(name for rows in every for name in rows)
        text, _ = table(title, {f"`{name}`": contestant(title, name) for name in names}, results)
        parts.append(text)
    for setting in padded(results):
        rows = {label: trained_on(setting, label) for label in PADDING}
        parts.append(table(setting, rows, results)[0])
    for benchmark, render in (("lengths", length), ("loss_curve", distance)):
        every = (found.get(benchmark, {}).get("contestants", {}) for found in results.values())
        names = dict.fromkeys(name for rows in every for name in rows)
        if names:
            label = next(
                found[benchmark].get("title", "distance of the loss to eager's, accuracy")
                for found in results.values()
                if benchmark in found
            )
            rows = {f"`{name}`": row_of(benchmark, name, render) for name in names}
            parts.append(table(label, rows, results)[0])
    intro = (
        "Medians in milliseconds; how many times as fast as eager in float32, and as eager in the "
        "contestant's precision.\n"
    )
    return "\n\n".join([intro.strip(), *parts, others(results)]) + "\n"


def contestant(title: str, name: str) -> Cell:
    """A contestant's time and both of its ratios."""

    def cell(found: Found) -> str:
        row = workload(found, title).get(name)
        if row is None or "skipped" in row:
            return "" if row is None else f"skipped: {row['skipped']}"
        told = f"{ms(row)} ms, {1 / row['ratio']:.2f}x"
        if row["ratio_same_precision"] != row["ratio"]:
            told += f", {1 / row['ratio_same_precision']:.2f}x"
        if row.get("ran", "").startswith("eager"):
            told += ", in PyTorch"
        if "peak_bytes" in row:
            told += f", {row['peak_bytes'] / 2**20:.0f} MiB"
        return told

    return cell


PADDING = ("eager", "all padding computed", "ortrain", "losses", "answers")


def trained_on(setting: str, label: str) -> Cell:
    """A row of the table of `padding.py`."""

    def cell(found: Found) -> str:
        row = settings(found).get(setting)
        if row is None:
            return ""
        if label in PADDING[:3]:
            own = [*row["contestants"].values()][PADDING.index(label)]
            told = f"{ms(own)} ms, {1 / own['ratio']:.2f}x"
            if "ratio_whole" in own:
                told += f", {1 / own['ratio_whole']:.2f}x of all computed"
            if own.get("left_out"):
                told += f"; {own['left_out']:.0%} of the multiplications left out"
            return told
        if label == "losses" and "losses" in row:
            far = row["losses"]
            return f"{far['largest']:.1e} apart at most in {far['steps']} steps, relative"
        if label == "answers" and "answers" in row:
            told = row["answers"]
            return f"{told['other_answers']} of {told['sentences']} held-out sentences otherwise"
        return ""

    return cell


def row_of(benchmark: str, name: str, render: Callable[[Found], str]) -> Cell:
    """A contestant in the only table of a benchmark."""

    def cell(found: Found) -> str:
        row = found.get(benchmark, {}).get("contestants", {}).get(name)
        if row is None or "skipped" in row:
            return "" if row is None else f"skipped: {row['skipped']}"
        return render(row)

    return cell


def length(row: Found) -> str:
    return (
        f"{ms(row)} ms, {1 / row['ratio']:.2f}x; {row['ratio_fixed_length']:.2f} of one length's; "
        f"first pass {row['first_pass_s']:.0f} s, {row['captures']} captures"
    )


def distance(row: Found) -> str:
    shares = row.get("accuracies")
    told = f"{row['mean']:.1e}, smoothed {row['smoothed']:.1e}"
    return told + (f"; {', '.join(f'{share:.3f}' for share in shares)}" if shares else "")


# --- both -----------------------------------------------------------------------------------------


def table(
    title: str, rows: Mapping[str, Cell], results: Mapping[str, Found]
) -> tuple[str, list[str]]:
    """The rows that some processor was measured for, and the processors that were for some row."""
    cells = {label: {name: cell(results[name]) for name in results} for label, cell in rows.items()}
    measured = [name for name in results if any(each[name] for each in cells.values())]
    lines = [_row(title, (f"`{name}`" for name in measured)), _row("---", ["---"] * len(measured))]
    for label, each in cells.items():
        if any(each.values()):
            lines.append(_row(label, (each[name] or "–" for name in measured)))
    return "\n".join(lines), measured


def _row(label: str, cells: Iterable[str]) -> str:
    return f"| {label} | " + " | ".join(cells) + " |"


def titles(results: Mapping[str, Found]) -> list[str]:
    """Of all workloads of `step.py`: other batches have another title, and a row of their own."""
    every = [found.get("step", {}).get("workloads", {}) for found in results.values()]
    keys = dict.fromkeys(key for workloads in every for key in workloads)
    found = (workloads[key]["title"] for key in keys for workloads in every if key in workloads)
    return [*dict.fromkeys(found)]


def workload(found: Found, title: str) -> dict[str, Any]:
    """The contestants of a workload."""
    workloads = found.get("step", {}).get("workloads", {}).values()
    rows: dict[str, Any] = next((w["contestants"] for w in workloads if w["title"] == title), {})
    return rows


def machine(name: str, found: Found) -> str:
    """What a processor's figures were taken on; files of different versions name them all."""
    every = [result["machine"] for result in found.values()]
    gpus, cores, processors, torches, blas, runtimes = (
        " and ".join(sorted({str(facts[key]) for facts in every if key in facts}))
        for key in ("gpu", "cores", "processor", "torch", "torch_blas", "onnxruntime")
    )
    gpu = f"an {gpus} beside " if gpus else ""
    return (
        f"[`{name}`](benchmarks/results/{name}): {gpu}{cores} cores of an {processors}, "
        f"torch {torches} (BLAS: {blas}), onnxruntime {runtimes}."
    )


def ms(row: Found) -> str:
    value = row["median_ms"]
    return f"{value:.0f}" if value >= 10 else f"{value:.3f}"


PAGES: tuple[tuple[Path, Callable[[Mapping[str, Found]], str]], ...] = (
    (README, gains),
    (PAGE, contestants),
    (QUANTIZATION, deployed.quantized),
    (FUSIONS, deployed.optimized),
)


if __name__ == "__main__":
    main()
