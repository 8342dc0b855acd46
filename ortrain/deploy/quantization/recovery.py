"""``Recovery``: a quantized model outside its budgets: nodes left out, then weights trained."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortrain.deploy.equivalence import Budgets, EquivalenceError, compare
from ortrain.deploy.quantization.half_precision import HalfPrecisionConfig
from ortrain.deploy.quantization.sensitivity import Sensitivity
from ortrain.errors import GradientError, GraphError, OrtrainError, listing

if TYPE_CHECKING:
    from ortrain.deploy.equivalence import EquivalenceReport, GoldenSet
    from ortrain.deploy.quantization.tuning.run import FineTuned

Configs = dict[str, Any]

_SHOWN = 5


@dataclass(frozen=True)
class Recovered:
    """What is written now.

    Attributes:
        report: of its comparison.
        configs: file → its configuration.
        sensitive: the nodes that were measured, those that change most first.
        tuned: of a training run, whose weights it has.
    """

    report: EquivalenceReport
    configs: Configs
    sensitive: list[Sensitivity]
    tuned: FineTuned | None = None


class Recovery:
    """Compares two models, and tries what may bring the second one into its budgets.

    Args:
        pair: paths of the models before and after; the latter is written anew for each try.
        golden: examples.
        budgets: to keep; None for none.
        write: writes the models of a configuration of each file, with the weights of a training
            run, or with those that they have.
        sensitivities: measures the nodes of the first configuration; called to recover alone, as
            it takes minutes.
        at_most: nodes that may be left out; None for all but one. With 0 none is measured.
        tune: trains the weights for the first configuration, or why nothing does.
    """

    def __init__(
        self,
        pair: tuple[Path, Path],
        golden: GoldenSet,
        budgets: Budgets | None,
        write: Callable[[Mapping[str, Any], FineTuned | None], None],
        sensitivities: Callable[[], list[Sensitivity]],
        at_most: int | None = None,
        tune: Callable[[], FineTuned] | str = "",
    ) -> None:
        self._pair, self._golden, self._budgets = pair, golden, budgets or Budgets()
        self._write, self._sensitivities = write, sensitivities
        self._at_most, self._tune = at_most, tune

    def run(self, configs: Configs, *, recover: bool) -> Recovered:
        """Compares what is written, and where it fails, what is left when nodes are excluded.

        The number of nodes is doubled until the budgets are kept, and then halved towards the
        fewest that are enough. Where none is, the weights are trained, with all nodes quantized.

        Args:
            configs: file → its configuration, which is what has been written.
            recover: whether to try others at all.

        Raises:
            EquivalenceError: none kept the budgets.
        """
        report = self._compare(quick=False)
        if report.passed:
            return Recovered(report, configs, [])
        if not recover:
            raise _refusal(report, [], (), _searched(configs))
        # Each node is a model to run on many examples; where none may be left out, none is run.
        sensitive = [] if self._at_most == 0 else self._sensitivities()
        excluded, told = self._excluded(configs, sensitive)
        if excluded is not None:
            return excluded
        tuned, of_training = self._tuned(report, configs, sensitive, told)
        if tuned is not None:
            return tuned
        raise _refusal(report, sensitive, tuple(filter(None, (told, of_training))))

    def _excluded(
        self, configs: Configs, sensitive: list[Sensitivity]
    ) -> tuple[Recovered | None, str]:
        """What is written with nodes left out; None, and what was tried, where none is enough."""
        most = len(sensitive) - 1
        if self._at_most is not None:
            most = min(most, self._at_most)
        if most < 1:
            return None, "no node was left out" if self._at_most == 0 else "no node can be left out"
        failed, count = 0, 1
        while failed < most:
            if self._passes(configs, sensitive, count):
                return self._fewest(configs, sensitive, failed, count), ""
            failed, count = count, min(count * 2, most)
        names = listing([each.node for each in sensitive[:most]], _SHOWN)
        return None, f"leaving out {most} of {len(sensitive)} nodes was not enough: {names}"

    def _fewest(
        self, configs: Configs, nodes: list[Sensitivity], failed: int, enough: int
    ) -> Recovered:
        while enough - failed > 1:
            middle = (failed + enough) // 2
            if self._passes(configs, nodes, middle):
                enough = middle
            else:
                failed = middle
        chosen = _without(configs, nodes[:enough])
        self._write(chosen, None)
        report = self._compare(quick=False)
        if not report.passed:  # what is measured in time may differ; nothing else does
            raise _refusal(report, nodes, ("excluding nodes was enough at first, and not again",))
        excluded = [each.node for each in nodes[:enough]]
        note = (
            f"outside the budgets at first; {enough} of {len(nodes)} nodes stayed as they were, "
            f"the most sensitive ones: {', '.join(excluded)}"
        )
        return Recovered(_noted(report, note), chosen, nodes)

    def _tuned(
        self, before: EquivalenceReport, configs: Configs, sensitive: list[Sensitivity], told: str
    ) -> tuple[Recovered | None, str]:
        """What is written with trained weights; None, and why, where that is not enough."""
        if isinstance(self._tune, str):
            return None, self._tune
        try:
            tuned = self._tune()
        except (GradientError, GraphError) as error:
            because = f" ({error.because})" if error.because else ""
            return None, f"fine-tuning was not possible: {error.what}{because}".replace("\n", " ")
        if tuned.steps < tuned.settings.steps and not tuned.enough:
            return None, f"{tuned.told()}: the loss was no number in the next step"
        self._write(configs, tuned)
        report = self._compare(quick=False)
        note = f"{tuned.told()}; {_change(before, report)}"
        if not report.passed:
            return None, note
        noted = _noted(report, f"outside the budgets at first; {told}", note)
        return Recovered(noted, configs, sensitive, tuned), ""

    def _passes(self, configs: Configs, nodes: list[Sensitivity], count: int) -> bool:
        self._write(_without(configs, nodes[:count]), None)
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


def _searched(configs: Configs) -> str:
    """What finds the nodes to exclude; of a model in 16 bits none is searched for."""
    if all(isinstance(config, HalfPrecisionConfig) for config in configs.values()):
        return ""
    return "on_fail='recover' searches for the nodes to exclude, which runs the model once for each"


def _noted(report: EquivalenceReport, *notes: str) -> EquivalenceReport:
    return dataclasses.replace(report, notes=(*report.notes, *notes))


def _change(before: EquivalenceReport, after: EquivalenceReport) -> str:
    """What training has changed of what decides: metrics, else predictions that stay, else values.

    Args:
        before: of the quantized model without it.
        after: with it.
    """
    told = [
        f"{name} {before.overall.after[name]:.4g} → {after.overall.after[name]:.4g} "
        f"(before quantization {after.overall.before[name]:.4g})"
        for name in after.metrics
        if name in after.overall.after
    ]
    if not told and before.overall.agreement is not None and after.overall.agreement is not None:
        told = [f"agreement {before.overall.agreement:.4g} → {after.overall.agreement:.4g}"]
    told = told or [f"largest difference {before.max_abs_diff:.4g} → {after.max_abs_diff:.4g}"]
    return ", ".join(told)


def _refusal(
    report: EquivalenceReport,
    sensitive: list[Sensitivity],
    tried: tuple[str, ...],
    remedy: str = "",
) -> EquivalenceError:
    """The error of a model that is not published.

    Args:
        report: of the quantized model as it was first.
        sensitive: its nodes.
        tried: what did not help, in order; empty where nothing was tried.
        remedy: one more.
    """
    if tried:
        report = _noted(report, *tried)
    error = EquivalenceError.of(report, "quantized model")
    because, help = error.because, error.help
    if sensitive:
        told = [
            f"{each.node} ({each.operator}, {each.signal_to_noise:.1f} dB)" for each in sensitive
        ]
        because = f"{because}; most sensitive: {listing(told, _SHOWN)}".removeprefix("; ")
    if tried:
        because = f"{because}; {'; '.join(tried)}".removeprefix("; ")
    if remedy:
        help = f"{help}; {remedy}".removeprefix("; ")
    OrtrainError.__init__(error, error.what, where=error.where, because=because, help=help)
    error.sensitivity = sensitive  # type: ignore[attr-defined]
    return error
