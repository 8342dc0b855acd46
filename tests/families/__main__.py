"""``make families``: the optimizer on files of every family of transformers, by each exporter.

::

    python -m tests.families                              # all, hours of one core
    python -m tests.families --exporter dynamo --only '^(bert|gpt2)$'
    python -m tests.families --again wrong                # those whose last outcome is this
    python -m tests.families --page > docs/families.md
"""

from __future__ import annotations

import argparse
import re
import sys

from tests.families import results
from tests.families.models import families
from tests.families.page import page
from tests.families.verdict import EXPORTERS
from tests.families.worker import judged


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.families")
    parser.add_argument("--exporter", choices=EXPORTERS, action="append", help="all by default")
    parser.add_argument("--only", default="", help="a regular expression: families that it finds")
    parser.add_argument("--task", default="", help="families that are tried with this task")
    parser.add_argument("--again", default="", help="files whose last outcome is this")
    parser.add_argument("--rest", action="store_true", help="files without a result yet")
    parser.add_argument("--slice", default="0/1", help="i/n: every n-th file, from the i-th")
    parser.add_argument("--page", action="store_true", help="print the page of the last results")
    parser.add_argument("--dry", action="store_true", help="keep the results as they are")
    options = parser.parse_args()
    if options.page:
        sys.stdout.write(page())
        return
    kept = results.load()
    keys = [
        (name, exporter)
        for name, family in families().items()
        if re.search(options.only, name) and options.task in ("", family.task.name)
        for exporter in options.exporter or EXPORTERS
    ]
    if options.again:
        keys = [(n, e) for n, e in keys if n in kept and kept[n].get(e)]
        keys = [(n, e) for n, e in keys if kept[n][e].outcome == options.again]
    if options.rest:
        keys = [(n, e) for n, e in keys if e not in kept.get(n, {})]
    first, step = map(int, options.slice.split("/"))
    keys = keys[first::step]
    for i, (name, exporter, verdict, seconds) in enumerate(judged(keys), 1):
        row = f"{i:4}/{len(keys)} {seconds:5.1f} s {verdict.outcome:<13} {name}, {exporter}"
        row += f" {verdict.attention}+{verdict.softmax} {verdict.nodes}"
        print(f"{row}: {verdict.reason}" if verdict.reason else row, flush=True)
        if not options.dry:
            kept = results.load()
            kept.setdefault(name, {})[exporter] = verdict
            results.save(kept)
    print(results.totals(kept))


if __name__ == "__main__":
    main()
