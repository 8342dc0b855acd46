"""The gate: a model before and after a rewrite, run on the same examples and held to budgets.

::

    from ortrain.deploy import Budgets, GoldenSet, compare

    golden = GoldenSet.from_file("golden.csv", "exported")
    report = compare("exported", "quantized", golden, Budgets(max_metric_drop=0.01))
    report.save("quantized")  # equivalence.json and equivalence.html
    assert report.passed, report.reasons
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortrain.lazy import attributes

if TYPE_CHECKING:
    from ortrain.deploy.equivalence.budgets import Budgets
    from ortrain.deploy.equivalence.comparison import compare
    from ortrain.deploy.equivalence.golden_set import GoldenSet
    from ortrain.deploy.equivalence.report import EquivalenceError, EquivalenceReport

_HOME = {
    "Budgets": "ortrain.deploy.equivalence.budgets",
    "EquivalenceError": "ortrain.deploy.equivalence.report",
    "EquivalenceReport": "ortrain.deploy.equivalence.report",
    "GoldenSet": "ortrain.deploy.equivalence.golden_set",
    "compare": "ortrain.deploy.equivalence.comparison",
}

__all__ = ["Budgets", "EquivalenceError", "EquivalenceReport", "GoldenSet", "compare"]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
