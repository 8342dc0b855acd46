"""The tables of files that were optimized and quantized, for their pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Found = dict[str, Any]

ROW = {"eager-bf16-weights": "eager-bf16", "eager-bf16-autocast": "eager-bf16"}
_HOW = {"eager-bf16-weights": "weights", "eager-bf16-autocast": "autocast"}


def quantized(results: Mapping[str, Found]) -> str:
    """The tables of `quantization.py`: one for each processor and number of threads."""
    lines = [
        "A MiniLM classifier of synthetic reviews: the size, held-out answers that are those of",
        "float32 and those that are right, and medians of turns with how many times as fast as",
        "float32 in onnxruntime and as eager PyTorch in float32 they are.",
    ]
    for processor, found in results.items():
        for threads, rows in _threads(found, "quantization"):
            sizes = _sizes(rows)
            head = ["", "size", "stays", "right", *sizes, "products run as"]
            lines += ["", *_head([f"`{processor}`, {_plural(threads)}", *head[1:]])]
            same = _same(rows)
            for name, row in _faster(rows, sizes).items():
                label = ", ".join(f"`{each}`" for each in (ROW.get(name, name), *same[name]))
                if name in ROW:
                    label += f" ({_HOW[name]})"
                if "skipped" in row:
                    lines.append(
                        _line([label, f"skipped: {row['skipped']}", *[""] * len(head[2:])])
                    )
                    continue
                lines.append(
                    _line(
                        [
                            label,
                            f"{row['bytes'] / 1e6:.1f} MB",
                            f"{row['agreement']:.1%}",
                            f"{row['accuracy']:.1%}",
                            *(_speed(row.get(size)) for size in sizes),
                            ", ".join(
                                f"{count} {kind}"
                                for kind, count in row["kernels"].items()
                                if kind != "DequantizeLinear"
                            )
                            or "–",
                        ]
                    )
                )
    return "\n".join([*lines, ""])


def optimized(results: Mapping[str, Found]) -> str:
    """The tables of `fusions.py`, likewise."""
    parts = []
    for processor, found in results.items():
        for threads, rows in _threads(found, "fusions"):
            sizes = _sizes(rows)
            lines = _head(
                [f"MiniLM classifier in onnxruntime, `{processor}`, {_plural(threads)}", *sizes]
            )
            for name, row in rows.items():
                lines.append(_line([f"`{name}`", *(_speed(row.get(size)) for size in sizes)]))
            parts.append("\n".join(lines))
    if not parts:
        return ""
    told = (
        "Beside each median: how many times as fast as the file as exported, and as eager PyTorch."
    )
    return "\n\n".join([told, *parts]) + "\n"


def _threads(found: Found, benchmark: str) -> list[tuple[str, Found]]:
    every = found.get(benchmark, {})
    return [(name, rows) for name, rows in every.items() if name.endswith(" threads")]


def _plural(threads: str) -> str:
    return "1 thread" if threads == "1 threads" else threads


def _sizes(rows: Found) -> list[str]:
    return [*dict.fromkeys(key for row in rows.values() for key in row if " x " in key)]


def _same(rows: Found) -> dict[str, list[str]]:
    """Names whose file is that of another, by the other's."""
    found: dict[str, list[str]] = {name: [] for name in rows}
    for name, row in rows.items():
        if "same_file_as" in row:
            found[row["same_file_as"]].append(name)
    return found


def _faster(rows: Found, sizes: list[str]) -> Found:
    """The rows with files of their own; of those that share a label the faster at the last size."""
    kept: Found = {}
    for name, row in rows.items():
        if "same_file_as" in row:
            continue
        other = next((each for each in kept if name in ROW and ROW.get(each) == ROW[name]), None)
        if other is not None:
            if "skipped" in row or _time(rows[other], sizes) <= _time(row, sizes):
                continue
            del kept[other]
        kept[name] = row
    return kept


def _time(row: Found, sizes: list[str]) -> float:
    return float(row[sizes[-1]]["median_ms"]) if sizes and sizes[-1] in row else float("inf")


def _speed(row: Found | None) -> str:
    if row is None:
        return "–"
    told = f"{row['median_ms']:.1f} ms, {1 / row['ratio']:.2f}x"
    return told + (f", {1 / row['ratio_eager']:.2f}x" if "ratio_eager" in row else "")


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
