"""The page of documentation that the results become."""

from __future__ import annotations

import torch

from tests.sweep.results import BAD, load, load_dtypes, totals
from tests.sweep.verdict import ENGINES, Outcome, Verdict

_HEAD = """\
# What becomes a graph

Written by `make sweep` from PyTorch's own tables of operators and modules (`op_db` and `module_db`
of torch {torch}): the first three samples of each row, outputs and every gradient, eager PyTorch
against the graph, on each engine.

{totals}

- **graph**: every sample ran as a graph, and agreed.
- **eager**: some or all of the samples ran in PyTorch, for the reason given; in brackets, how many
  of them ran as a graph. The results are PyTorch's.
- **not comparable**: two runs of eager PyTorch differ (random numbers, uninitialised memory), it
  returns no tensor, or it raises itself.

The tables below are of {first}; where {second} has another outcome, a line of its own follows.

"""

_DTYPES = """\
## Other dtypes

Written by `make sweep-dtypes`: more samples of each operator and each module, of one dtype; those
that do not take it are not comparable. Bad is wrong, or raising where eager runs.

| dtype | engine | samples | operators: graph | eager | bad | modules: graph | eager | bad |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Totals of the engines, and a table of each kind of row."""
    first, second = ENGINES
    verdicts, others = load(first), load(second)
    counts = "\n".join(
        f"- {engine}, {line}" for engine in ENGINES for line in totals(load(engine)).splitlines()
    )
    text = _HEAD.format(
        torch=torch.__version__.split("+")[0], totals=counts, first=first, second=second
    )
    text += _of_dtypes()
    for kind in ("operator", "module"):
        text += f"## {kind.title()}s\n\n| {kind} | | |\n| --- | --- | --- |\n"
        rows = {k: v for k, v in verdicts.items() if k.startswith(f"{kind} ")}
        for key, verdict in sorted(rows.items()):
            name = key.removeprefix(f"{kind} ")
            text += _row(f"`{name}`", verdict)
            other = others.get(key, verdict)
            if _outcome(other) != _outcome(verdict):
                text += _row(f"`{name}` on {second}", other)
        text += "\n"
    return text.rstrip("\n") + "\n"


def _row(name: str, verdict: Verdict) -> str:
    return f"| {name} | {_outcome(verdict)} | {_escaped(verdict.reason)} |\n"


def _of_dtypes() -> str:
    kept = [
        (engine, dtype, each)
        for engine, dtypes in load_dtypes().items()
        for dtype, each in dtypes.items()
    ]
    text = _DTYPES
    for engine, dtype, each in kept:
        cells = [dtype, engine, each["samples"]]
        for count in each["counts"].values():
            bad = sum(count[outcome] for outcome in BAD)
            cells += [count[Outcome.GRAPH], count[Outcome.EAGER], bad]
        text += f"| {' | '.join(map(str, cells))} |\n"
    bad = [
        f"\n- {dtype} on {engine}, `{key}`: {_escaped(why)}"
        for engine, dtype, each in kept
        for key, why in each["bad"].items()
    ]
    return text + "".join(bad) + "\n" * (2 if bad else 1)


def _outcome(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.EAGER and verdict.graphs:
        return f"eager ({verdict.graphs} of {verdict.samples})"
    return verdict.outcome.value


def _escaped(text: str) -> str:
    for character in "|*<_[]":
        text = text.replace(character, "\\" + character)
    return text
