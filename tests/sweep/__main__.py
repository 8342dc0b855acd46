"""``make sweep``: PyTorch's operators and modules, in eager PyTorch and as graphs.

::

    python -m tests.sweep                          # all rows, an hour of one core
    python -m tests.sweep --engine aten            # the same on PyTorch's own kernels
    python -m tests.sweep --only 'operator scatter' --jobs 1
    python -m tests.sweep --dtype int64 --samples 8        # wider: dtypes.json keeps the counts
    python -m tests.sweep --page > docs/coverage.md
"""

from __future__ import annotations

import argparse
import re
import sys

from tests.sweep import results
from tests.sweep.page import page
from tests.sweep.rows import SAMPLES, all_rows
from tests.sweep.verdict import ENGINES
from tests.sweep.worker import judged


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="of the graphs")
    parser.add_argument("--only", default="", help="a regular expression: rows that it finds")
    parser.add_argument("--again", default="", help="rows whose last outcome is this word")
    parser.add_argument("--rest", action="store_true", help="rows without a result yet")
    parser.add_argument("--slice", default="0/1", help="i/n: every n-th row, from the i-th")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    parser.add_argument("--page", action="store_true", help="print the page of the last results")
    parser.add_argument("--dry", action="store_true", help="keep the results as they are")
    parser.add_argument("--samples", type=int, help="of a row, at most")
    parser.add_argument("--dtype", help="of the samples, in place of the first that a row takes")
    options = parser.parse_args()
    wider = ()
    if options.samples or options.dtype:
        wider = (str(options.samples or SAMPLES), options.dtype or "float32")
    if options.page:
        sys.stdout.write(page())
        return
    engine = options.engine
    known = results.load(engine)
    keys = [key for key in all_rows() if re.search(options.only, key)]
    if options.again:
        keys = [k for k in keys if k in known and known[k].outcome == options.again]
    if options.rest:
        keys = [key for key in keys if key not in known]
    first, step = map(int, options.slice.split("/"))
    keys = keys[first::step]
    for i, (key, verdict, seconds) in enumerate(judged(keys, options.jobs, engine, wider), 1):
        before = known.get(key)
        mark = " " if before == verdict else "*"
        row = f"{i:4}/{len(keys)} {seconds:5.1f} s {mark} {verdict.outcome:<14} {key}"
        print(f"{row}: {verdict.reason}" if verdict.reason else row, flush=True)
        known[key] = verdict
        if not (options.dry or wider) and (i % 20 == 0 or i == len(keys)):
            results.save(engine, known)
    if wider and len(keys) == len(all_rows()) and not options.dry:
        found = {key: known[key] for key in keys}
        results.save_dtype(engine, wider[1], int(wider[0]), found)
    print(results.totals({key: known[key] for key in keys} if wider else known))


if __name__ == "__main__":
    main()
