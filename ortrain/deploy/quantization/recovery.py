"""``Recovery``: a quantized model outside its budgets, with its most sensitive nodes left out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortrain.deploy.equivalence import Budgets, EquivalenceError, compare
from ortrain.deploy.quantization.sensitivity import Sensitivity
from ortrain.errors import OrtrainError, listing

if TYPE_CHECKING:
    from ortrain.deploy.equivalence import EquivalenceReport, GoldenSet

Configs = dict[str, Any]
Found = tuple["EquivalenceReport", Configs, list[Sensitivity]]

_SHOWN = 5


class Recovery:
    """Compares two models, and tries configurations that exclude ever more nodes.

    Args:
        pair: paths of the models before and after; the latter is written anew for each try.
        golden: examples.
        budgets: to keep; None for none.
        write: writes the models of a configuration of each file.
        sensitivities: measures the nodes of the first configuration.
    """

    def __init__(
        self,
        pair: tuple[Path, Path],
        golden: GoldenSet,
        budgets: Budgets | None,
        write: Callable[[Mapping[str, Any]], None],
        sensitivities: Callable[[], list[Sensitivity]],
    ) -> None:
        self._pair, self._golden, self._budgets = pair, golden, budgets or Budgets()
        self._write, self._sensitivities = write, sensitivities

    def run(self, configs: Configs, *, recover: bool) -> Found:
        """Compares what is written, and where it fails, what is left when nodes are excluded.

        The number of nodes is doubled until the budgets are kept, and then halved towards the
        fewest that are enough.

        Args:
            configs: file → its configuration, which is what has been written.
            recover: whether to try others at all.

        Returns:
            The report of what is written now, its configurations, and the nodes that were measured.

        Raises:
            EquivalenceError: none kept the budgets.
        """
        report = self._compare(quick=False)
        if report.passed:
            return report, configs, []
        sensitive = self._sensitivities()
        if recover and sensitive:
            failed, count = 0, 1
            while count < len(sensitive):
                if self._passes(configs, sensitive, count):
                    return self._fewest(configs, sensitive, failed, count)
                failed, count = count, count * 2
        raise _refusal(report, sensitive, recover)

    def _fewest(
        self, configs: Configs, nodes: list[Sensitivity], failed: int, enough: int
    ) -> Found:
        while enough - failed > 1:
            middle = (failed + enough) // 2
            if self._passes(configs, nodes, middle):
                enough = middle
            else:
                failed = middle
        chosen = _without(configs, nodes[:enough])
        self._write(chosen)
        report = self._compare(quick=False)
        if not report.passed:  # what is measured in time may differ; nothing else does
            raise _refusal(report, nodes, True)
        excluded = [each.node for each in nodes[:enough]]
        note = (
            f"outside the budgets at first; {enough} of {len(nodes)} nodes stayed as they were, "
            f"the most sensitive ones: {', '.join(excluded)}"
        )
        return dataclasses.replace(report, notes=(*report.notes, note)), chosen, nodes

    def _passes(self, configs: Configs, nodes: list[Sensitivity], count: int) -> bool:
        self._write(_without(configs, nodes[:count]))
        return self._compare(quick=True).passed

    def _compare(self, *, quick: bool) -> EquivalenceReport:
        before, after = self._pair
        further: dict[str, Any] = {"latency_runs": 0, "memory": False} if quick else {}
        return compare(before, after, self._golden, self._budgets, **further)


def _without(configs: Configs, nodes: list[Sensitivity]) -> Configs:
    changed = copy.deepcopy(configs)
    for each in nodes:
        changed[each.file].nodes_to_exclude.append(each.node)
    return changed


def _refusal(
    report: EquivalenceReport, sensitive: list[Sensitivity], recover: bool
) -> EquivalenceError:
    error = EquivalenceError.of(report, "quantized model")
    if sensitive:
        told = [
            f"{each.node} ({each.operator}, {each.signal_to_noise:.1f} dB)" for each in sensitive
        ]
        because = f"{error.because}; most sensitive: {listing(told, _SHOWN)}".removeprefix("; ")
        remedy = "excluding them was not enough" if recover else "on_fail='recover' excludes them"
        help = f"{error.help}; {remedy}".removeprefix("; ")
        OrtrainError.__init__(error, error.what, where=error.where, because=because, help=help)
    error.sensitivity = sensitive  # type: ignore[attr-defined]
    return error
