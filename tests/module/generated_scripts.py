"""Whole scripts made up at random: what users do with a module, in any order.

By hand, for more than the suite runs::

    python -m tests.module.generated_scripts 500 --engine aten
    python -m tests.module.generated_scripts --seed 17 --engine onnxruntime

Of a script that fails, the shortest that still fails is printed, as a file that runs.
"""

from __future__ import annotations

import argparse
import random
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass, replace
from string import Template
from typing import Any

import torch

from ortrain import Options
from ortrain.step.prospect import Prospect
from tests.module.scripted_actions import ACTIONS, CALLS, CHANGES
from tests.module.scripted_modules import MODULES
from tests.module.scripted_run import Difference, agree

ENGINES = ("aten", "onnxruntime", "auto")
# Of which a script has one now and then: options that change no number.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"memory_budget": "least"},
    {"memory_budget": 1.0},
    {"backward_pieces": 3},
    {"parts": False},
    {"custom_autograd": False},
    {"retry": True},
    {"skip_padding": False},
    {"opset": 18},
)

PREAMBLE = """\
import copy, gc, inspect, io, pickle, warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from ortrain import Options
from ortrain.hooks import SubscriberManager
from ortrain.optim import FusedAdam, clip_grad_norm_
from tests.module.scripted_modules import Around, Doubling, Halved, Lora, Normed
from tests.module.scripted_modules import Recomputed, Running
from tests.module.scripted_run import agree

"""


@dataclass(frozen=True)
class Made:
    """A script.

    Attributes:
        seed: that it is made of.
        kind: of its module.
        double: whether the module is in float64.
        actions: names, and their lines.
        certificate: when graphs are compared with the module.
        settings: further options of ``ORTModule``.
    """

    seed: int
    kind: str
    double: bool
    actions: tuple[tuple[str, str], ...]
    certificate: str = "first"
    settings: tuple[tuple[str, Any], ...] = ()

    def source(self, engine: str) -> str:
        """The script as a file."""
        body = [
            f"with s.step({f'{place}: {name}'!r}):\n{textwrap.indent(lines.strip(), '    ')}\n"
            for place, (name, lines) in enumerate(self.actions)
        ]
        dtype = "torch.float64" if self.double else "torch.float32"
        given = {"engine": engine, "certificate": self.certificate, **dict(self.settings)}
        options = f"Options({', '.join(f'{name}={value!r}' for name, value in given.items())})"
        asked = f"dtype={dtype}, seed={self.seed}, options={options}"
        return (
            f"{PREAMBLE}\ndef script(s):\n{textwrap.indent(''.join(body) or 'pass', '    ')}\n\n"
            f"if __name__ == '__main__':\n    torch.set_num_threads(1)\n"
            f"    agree(script, {self.kind!r}, {asked})\n"
        )

    def run(self, engine: str) -> tuple[int, int]:
        """Runs it on both, and compares.

        Returns:
            The calls that ran as a graph, and in PyTorch.

        Raises:
            Difference: they differ.
        """
        names: dict[str, Any] = {"__name__": "generated_script"}
        exec(compile(self.source(engine), f"<script {self.seed}>", "exec"), names)  # noqa: S102
        return agree(
            names["script"],
            self.kind,
            dtype=torch.float64 if self.double else torch.float32,
            seed=self.seed,
            options=Options(
                engine=engine,  # type: ignore[arg-type]
                certificate=self.certificate,  # type: ignore[arg-type]
                **dict(self.settings),
            ),
        )

    def shortest(self, engine: str) -> tuple[Made, Exception]:
        """The script without what it takes not to agree, and what differs then."""
        failing, found = self, self._failure(engine)
        assert found is not None
        width = max(1, len(self.actions) // 2)
        while width:
            at = 0
            while at < len(failing.actions):
                left = failing.actions[:at] + failing.actions[at + width :]
                shorter = replace(failing, actions=left)
                error = shorter._failure(engine)
                if error is None:
                    at += width
                else:
                    failing, found = shorter, error
            width //= 2
        return failing, found

    def _failure(self, engine: str) -> Exception | None:
        try:
            self.run(engine)
        except Exception as error:
            return error
        return None


def script(seed: int, *, only: str = "", kind: str = "") -> Made:
    """One made up from a seed.

    Args:
        seed: any.
        only: an action that is in it in any case.
        kind: of the module; any by default.
    """
    draw = random.Random(seed)
    kind = kind or [*MODULES][seed % len(MODULES)]
    names: list[str] = ["step"] if draw.random() < 0.7 else []
    for _ in range(draw.randint(4, 9)):
        if draw.random() < 0.6:
            names.append(draw.choice([*CHANGES]))
        names.append(draw.choice([*CALLS]) if draw.random() < 0.7 else "step")
    if only:
        names.insert(draw.randrange(len(names)), only)
    certificate = "off" if draw.random() < 0.3 else "first"
    actions = tuple((name, _filled(ACTIONS[name], draw)) for name in names)
    double = draw.random() < 0.4
    settings = draw.choice(SETTINGS) if draw.random() < 0.3 else {}
    return Made(seed, kind, double, actions, certificate, tuple(settings.items()))


def _filled(lines: str, draw: random.Random) -> str:
    return Template(lines).substitute(
        n=draw.choice([2, 2, 3, 4, 5]),
        length=draw.choice([2, 3, 4, 5]),
        which=draw.randrange(12),
        rate=draw.choice([0.03, 0.05, 0.1]),
    )


def main() -> None:
    """Runs scripts, and prints those that fail, shortened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("count", nargs="?", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, default="aten")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--whole", action="store_true", help="do not shorten")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    # A graph is made at once: scripts are short, and in none would it pay.
    Prospect.pays = lambda *_: True  # type: ignore[method-assign]
    seeds = range(asked.first, asked.first + asked.count)
    calls: Counter[str] = Counter()
    start = time.monotonic()
    for seed in [asked.seed] if asked.seed is not None else seeds:
        made = script(seed)
        try:
            graph, eager = made.run(asked.engine)
            calls.update(agreed=1, graph=graph, eager=eager)
        except Exception as first:
            calls["failed"] += 1
            error = first
            if not asked.whole:
                made, error = made.shortest(asked.engine)
            names = ", ".join(name for name, _ in made.actions)
            kind = "" if isinstance(error, Difference) else "the script itself: "
            print(
                f"### {seed} {made.kind} {made.double=} {made.certificate} {made.settings}: {names}"
            )
            print(f"    {kind}{type(error).__name__}: {str(error)[:1500]}", flush=True)
            if asked.seed is not None:
                print(made.source(asked.engine))
    print(dict(calls), f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
