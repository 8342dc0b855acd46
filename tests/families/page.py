"""The page of documentation that the results become."""

from __future__ import annotations

import torch
import transformers

from tests.families.models import families
from tests.families.results import load, totals
from tests.families.verdict import EXPORTERS, Outcome, Verdict

_HEAD = """\
# Which families the optimizer was tried on

Written by `make families`: a small model of each family of transformers {transformers}, with
weights drawn at random, written by `torch.onnx.export` of torch {torch} (its older exporter at
opsets 14 and 17, its newer one) and by `ORTModelFor….from_pretrained(model, export=True)`, then
`ORTOptimizer` at `O1` to `O4`.

{totals}

- **same**: each level answers as the file did, on batches of other sizes than the exporter has
  seen, padded at either end: to 1e-3 of the largest number at `O1` and `O2`, 5e-3 at `O3` (GELU by
  tanh), 4e-2 at `O4` (float16). Files of `ortrain` also answer as PyTorch does, and write its
  tokens: greedy, by beams, sampled with a seed, without a cache, before and after `O2`.
- **not exported**, **not run**: the exporter refuses the model, or onnxruntime its file; for
  `ortrain` the reason stands below.
- **refused**: `ORTModelFor…` does not take the call, with an error that says why.
- **not built**: the family's own code does not run with the small sizes that were tried.

In brackets: nodes of attention after `O2`, and behind the plus nodes of softmax that are left,
those of routers and of other things than attention, too. What was not tried has no entry.

| family | tried with | {heads} |
| --- | --- |{lines}
"""


def page() -> str:
    """Totals, a table of families, and why ortrain does not export some."""
    kept, known = load(), families()
    text = _HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        totals="\n".join(f"- {line}" for line in totals(kept).splitlines()),
        heads=" | ".join(EXPORTERS),
        lines=" --- |" * len(EXPORTERS),
    )
    reasons = []
    for name, row in kept.items():
        if name not in known:
            continue
        if all(each.outcome is Outcome.NOT_BUILT for each in row.values()):
            continue
        cells = [_cell(row.get(exporter)) for exporter in EXPORTERS]
        text += f"| `{name}` | {known[name].task.name} | {' | '.join(cells)} |\n"
        own = row.get("ortrain")
        if own is not None and own.outcome not in (Outcome.SAME, Outcome.NOT_BUILT):
            reasons.append(f"- `{name}`: {_escaped(own.reason)}\n")
    text += "\n## What ortrain does not export\n\n" + "".join(reasons)
    unbuilt = sorted(
        name
        for name, row in kept.items()
        if all(each.outcome is Outcome.NOT_BUILT for each in row.values())
    )
    return text + f"\n## What was not built\n\n{', '.join(f'`{name}`' for name in unbuilt)}\n"


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.outcome is Outcome.SAME:
        return f"same ({verdict.attention}+{verdict.softmax})"
    return verdict.outcome.value


def _escaped(text: str) -> str:
    for character in "|*<_[]":
        text = text.replace(character, "\\" + character)
    return text
