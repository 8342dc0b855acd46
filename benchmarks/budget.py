"""What a memory budget costs in time, and how close a process comes to the predicted peak.

    python benchmarks/budget.py [bert-base minilm gpt2 resnet] [--budgets none 0.5 0.5/back]

Each training is a process of its own: forward and backward, in float32. The peak is that of the
resident set over a few steps, less what was resident after the first one with all that was free
given back. ``1.0/back`` and its like have blocks go back to the system as soon as they are freed,
``Options(arena=False)``. ``--largest`` takes the largest batch that is predicted to fit into
what the workload takes, and one a quarter larger.
"""

from __future__ import annotations

import json
import math
import statistics
from functools import partial
from typing import Any

from measurement import (
    ProcessFailed,
    Results,
    Row,
    arguments,
    in_a_process,
    milliseconds,
    one_of,
    turns,
)
from memory import Peak
from workloads import Made, Workload, bert, gpt2, loss_of, minilm_model, resnet, text_batch

BUDGETS = (
    "none", "0.75", "0.63", "0.5", "0.35", "least",
    "1.0/back", "0.75/back", "0.5/back", "least/back",
)  # fmt: skip
STEPS = 3


def minilm() -> Made:
    """MiniLM's shape on a batch of 16 x 256."""
    return minilm_model(), [text_batch(30522, 16, 256, padded=False)]


MODELS = {
    "bert-base": Workload(
        title="BERT-base, batch 8 x 512, dropout",
        make=partial(bert, layers=12, length=512, padded=False),
    ),
    "minilm": Workload(title="MiniLM-L6 shape, batch 16 x 256, dropout", make=minilm),
    "gpt2": Workload(
        title="4 layers of GPT-2 small, batch 8 x 128, dropout", make=partial(gpt2, batch=8)
    ),
    "resnet": Workload(title="ResNet-18, 16 images of 224 x 224", make=resnet),
}


def child(name: str, budget: str, share: str) -> Row:
    """The peak and the time of a step, in this process.

    Args:
        name: of the model.
        budget: one of ``BUDGETS``, or a number of bytes for which the largest batch is taken.
        share: of that batch, that is trained on.
    """
    import ortrain
    from ortrain import Options, ORTModule
    from ortrain.runtime.memory import release_free_memory, resident

    module, (batch,) = MODELS[name].make()
    found: Row = {}
    share_of, _, back = budget.partition("/")
    named = {"none": None, "least": "least"}
    given: Any = named[share_of] if share_of in named else float(share_of)
    if budget.isdigit():
        given, back = None, "back"
        memory = ortrain.explain(module, **batch, options=Options(engine="aten")).memory
        assert memory is not None
        largest = memory.largest_batch(int(budget))
        rows = math.ceil(largest * float(share))
        found["batch"] = rows
        repeated = math.ceil(rows / len(next(iter(batch.values()))))
        batch = {key: tensor.repeat_interleave(repeated, 0)[:rows] for key, tensor in batch.items()}
    options = Options(
        engine="aten", memory_budget=given, arena=not back, certificate="off", fallback="raise"
    )
    model: Any = ORTModule(module, options=options)

    def step() -> None:
        outputs = model(**batch)  # which a loop has in hand until the next step
        loss_of(outputs).backward()
        model.zero_grad()

    first = milliseconds(step)
    release_free_memory()
    before = resident()
    sampled = Peak()
    sampled.start()
    times = [milliseconds(step) for _ in range(STEPS)]
    sampled.stopped = True
    sampled.join()
    report = model.report
    found |= {"predicted": report.peak_bytes, "saved": report.saved_bytes, "first_ms": first}
    return {**found, "peak": sampled.resident - before, "median_ms": statistics.median(times)}


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("workloads", nargs="*", default=[*MODELS], type=one_of(MODELS))
    parser.add_argument("--budgets", nargs="+", default=[*BUDGETS], type=one_of(BUDGETS))
    parser.add_argument("--largest", action="store_true", help="the largest batch that fits, too")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    results = Results("budget", options.json)
    for name in options.workloads:
        print(MODELS[name].title)
        seen: dict[str, list[Row]] = {}
        for budget in turns(options.budgets, options.rounds):
            try:
                row = in_a_process(__file__, name, budget, "1")
            except ProcessFailed as failure:
                row = {"skipped": str(failure)}
            seen.setdefault(budget, []).append(row)
        rows = {budget: _middle(each) for budget, each in seen.items()}
        base, title = rows[options.budgets[0]], {"title": MODELS[name].title}
        results.save(workloads={name: {**title, **rows}})
        if options.largest:
            largest: dict[str, Row] = {}
            limit = str(rows.get("1.0/back", base)["predicted"] * 2)
            for share in ("1", "1.25"):
                row = in_a_process(__file__, name, limit, share)
                largest[f"{share} of the largest batch"] = {**row, "limit": int(limit)}
            results.save(largest={name: {**title, **largest}})
            rows |= largest
        for budget, row in rows.items():
            print(f"  {budget:<26}{told(row, base)}", flush=True)


def _middle(rows: list[Row]) -> Row:
    """The row whose time is in the middle."""
    ordered = sorted(rows, key=lambda row: row.get("median_ms", math.inf))
    return ordered[(len(ordered) - 1) // 2]


def told(row: Row, base: Row) -> str:
    """A row in words, compared with another."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    text = (
        f"predicted {row['predicted'] / 2**20:6.0f} MiB, process {row['peak'] / 2**20:6.0f} "
        f"({row['predicted'] / row['peak']:.3f}), {row['peak'] / base['peak']:.2f} of the first's, "
        f"step {row['median_ms']:7.0f} ms ({row['median_ms'] / base['median_ms']:.2f})"
    )
    if "limit" in row:
        text += f", batch {row['batch']}, {row['peak'] / row['limit']:.3f} of the limit"
    return text


if __name__ == "__main__":
    main()
