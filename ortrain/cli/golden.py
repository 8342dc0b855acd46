"""Options of the commands that compare models: the examples, the budgets, and the report."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortrain.cli.arguments import column_names, count, not_negative, path
from ortrain.cli.usage import FileError, UsageError, excerpt, one_line, told, visible
from ortrain.errors import MissingPackage, OrtrainError, SaveError, listing

if TYPE_CHECKING:
    from ortrain.deploy.equivalence.budgets import Budgets
    from ortrain.deploy.equivalence.golden_set import GoldenSet
    from ortrain.deploy.equivalence.report import EquivalenceReport

BUDGETS = ("max_abs_diff", "max_metric_drop", "max_class_drop", "max_slice_drop", "min_agreement")


def budget(text: str) -> tuple[str, float]:
    """A budget as ``NAME=NUMBER``."""
    name, equals, value = text.partition("=")
    if not equals or name.replace("-", "_") not in BUDGETS:
        raise argparse.ArgumentTypeError(
            f"'{excerpt(text)}' is not NAME=NUMBER with one of {', '.join(BUDGETS)}"
        )
    return name.replace("-", "_"), not_negative(value)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what says how examples are read, what may differ, and where the report goes."""
    group = parser.add_argument_group("comparing")
    add = group.add_argument
    add(
        "--budget",
        type=budget,
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help=f"what may differ at most, once for each of {', '.join(BUDGETS)}",
    )
    add("--report", type=path, metavar="DIR", help="write the report there, whatever it says")
    add(
        "--text-column",
        type=column_names,
        default=("text",),
        metavar="NAME",
        help="column or key of the text; two with a comma for pairs (text)",
    )
    add("--label-column", default="label", metavar="NAME", help="of the label (%(default)s)")
    add(
        "--slice-column",
        action="append",
        default=[],
        metavar="NAME",
        help="column whose values are slices that are measured by themselves; may be repeated",
    )
    add("--batch-size", type=count, default=8, metavar="N", help="examples (%(default)s)")
    add("--max-length", type=count, metavar="N", help="tokens (as the tokenizer says)")
    add("--limit", type=count, metavar="N", help="examples to read at most (all)")
    add("--task", metavar="TASK", help="what the model predicts (as its configuration says)")
    add("--metric", metavar="NAME", help="that decides (the first of the task)")


def budgets_of(options: argparse.Namespace) -> Budgets:
    """The budgets of a command line.

    Raises:
        UsageError: one is there twice, or is out of its range.
    """
    from ortrain.deploy.equivalence.budgets import Budgets

    found: dict[str, float] = {}
    for name, value in options.budget:
        if name in found:
            raise UsageError(f"--budget {name}: is given twice; leave one out")
        found[name] = value
    assert {field.name for field in dataclasses.fields(Budgets)} == {*BUDGETS}
    try:
        return Budgets(**found)
    except ValueError as error:
        raise UsageError(f"--budget {one_line(error)}") from error


def golden_set(options: argparse.Namespace, file: Path, model: Path) -> GoldenSet:
    """The examples of a file, as the options say.

    Args:
        options: of the command line.
        file: of the examples.
        model: whose tokenizer and classes they are for.

    Raises:
        OrtrainError: they cannot be read.
        ValueError: there is no such task or metric.
    """
    from ortrain.deploy.equivalence.golden_set import GoldenSet

    if len(options.text_column) > 2:
        raise UsageError("--text-column: more than two columns; a model reads a text or a pair")
    first, *second = options.text_column
    return GoldenSet.from_file(
        file,
        model,
        text_column=(first, second[0]) if second else first,
        label_column=options.label_column,
        slice_columns=options.slice_column,
        batch_size=options.batch_size,
        max_length=options.max_length,
        limit=options.limit,
        task=options.task,
        metric=options.metric,
    )


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """What ortrain raises inside becomes what `main` prints and exits with.

    Raises:
        UsageError: in place of what is wrong with an input.
        FileError: in place of what could not be written.
    """
    try:
        yield
    except MissingPackage:
        raise
    except SaveError as error:
        raise FileError(told(error)) from error
    except OrtrainError as error:
        raise UsageError(told(error)) from error
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise FileError(f"{place}{error.strerror or one_line(error)}") from error


def given(options: argparse.Namespace, file: Path | None) -> dict[str, Any]:
    """The arguments of a tool that say what it compares on; none without a file."""
    if file is None:
        return {}
    found: dict[str, Any] = {"validate": golden_set(options, file, options.source)}
    if options.budget:  # else the tool's own
        found["budgets"] = budgets_of(options)
    return found


def gated(
    publish: Callable[[], None], options: argparse.Namespace, remedy: str = ""
) -> tuple[EquivalenceReport | None, str]:
    """Has a tool publish a model, and reads the report of its comparison.

    Args:
        publish: writes to ``options.output``, or raises EquivalenceError.
        options: of the command line.
        remedy: what to do where nothing was published and no nodes were measured.

    Returns:
        The report, also of what was not published; None where nothing was compared. With it, as a
        sentence, the nodes to which it is due that nothing was published, or the remedy.
    """
    from ortrain.deploy.equivalence.report import EquivalenceError, EquivalenceReport

    before = _stamp(options.output)
    try:
        publish()
    except EquivalenceError as error:
        nodes = [
            f"{each.node} ({each.operator}, {each.signal_to_noise:.1f} dB)"
            for each in getattr(error, "sensitivity", ())
        ]
        told = f"the most sensitive nodes are {listing(nodes)}; leave them as they are: --exclude"
        return error.report, told if nodes else remedy
    if _stamp(options.output) in (None, before):
        return None, ""
    return EquivalenceReport.load(options.output), ""


def finish(
    report: EquivalenceReport | None, options: argparse.Namespace, sensitive: str = ""
) -> int:
    """Prints what a report says, keeps it where it was asked for, and gives the exit status.

    Args:
        report: of the comparison; None where nothing was compared.
        options: of the command line.
        sensitive: one more sentence of why nothing was published.

    Returns:
        0 inside the budgets, 1 outside: then each reason is a line on standard error.
    """
    lines = []
    if report is not None:
        if options.report is not None:
            with told_in_one_line():
                _, page = report.save(options.report)
            lines.append(f"the report is {page}")
        lines.insert(0, report.summary())
    if (report is None or report.passed) and "output" in options:
        lines.append(f"the model is in {options.output}")
    print("\n".join(lines))
    for reason in () if report is None else (*report.reasons, sensitive):
        if reason:
            print(f"ortrain: error: {visible(reason)}", file=sys.stderr)
    return 0 if report is None or report.passed else 1


def _stamp(folder: Path) -> tuple[int, int] | None:
    """What tells one report in a folder from another one."""
    try:
        status = (folder / "equivalence.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
