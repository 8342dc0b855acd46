"""The page of documentation that the results become."""

from __future__ import annotations

import torch

from tests.sweep.results import BAD, load_dtypes, totals
from tests.sweep.verdict import Outcome, Verdict

_HEAD = """\
# What becomes a graph

Written by `make sweep` from PyTorch's own tables of operators and modules (`op_db` and `module_db`
of torch {torch}): the first three samples of each row, outputs and every gradient, eager PyTorch
against the graph.

{totals}

- **graph**: every sample ran as a graph, and agreed.
- **eager**: some or all of the samples ran in PyTorch, for the reason given; in brackets, how many
  of them ran as a graph. The results are PyTorch's.
- **not comparable**: two runs of eager PyTorch differ (random numbers, uninitialised memory), it
  returns no tensor, or it raises itself.

"""

_DTYPES = """\
## Other dtypes

Written by `make sweep-dtypes`: more samples of each operator and each module, of one dtype; those
that do not take it are not comparable. Bad is wrong, or raising where eager runs.

| dtype | samples | operators: graph | eager | bad | modules: graph | eager | bad |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page(verdicts: dict[str, Verdict]) -> str:
    """Totals, and a table of each kind of row."""
    counts = "\n".join(f"- {line}" for line in totals(verdicts).splitlines())
    text = _HEAD.format(torch=torch.__version__.split("+")[0], totals=counts)
    text += _of_dtypes()
    for kind in ("operator", "module"):
        text += f"## {kind.title()}s\n\n| {kind} | | |\n| --- | --- | --- |\n"
        rows = {k: v for k, v in verdicts.items() if k.startswith(f"{kind} ")}
        for key, verdict in sorted(rows.items()):
            name = key.removeprefix(f"{kind} ")
            text += f"| `{name}` | {_outcome(verdict)} | {_escaped(verdict.reason)} |\n"
        text += "\n"
    return text.rstrip("\n") + "\n"


def _of_dtypes() -> str:
    kept = load_dtypes()
    text = _DTYPES
    for name, each in kept.items():
        cells = [name, each["samples"]]
        for count in each["counts"].values():
            bad = sum(count[outcome] for outcome in BAD)
            cells += [count[Outcome.GRAPH], count[Outcome.EAGER], bad]
        text += f"| {' | '.join(map(str, cells))} |\n"
    bad = [(name, key, why) for name, each in kept.items() for key, why in each["bad"].items()]
    text += "".join(f"\n- {name}, `{key}`: {_escaped(why)}" for name, key, why in bad)
    return text + "\n" * (2 if bad else 1)


def _outcome(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.EAGER and verdict.graphs:
        return f"eager ({verdict.graphs} of {verdict.samples})"
    return verdict.outcome.value


def _escaped(text: str) -> str:
    for character in "|*<_[]":
        text = text.replace(character, "\\" + character)
    return text
