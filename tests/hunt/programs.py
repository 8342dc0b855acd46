"""Programs made up at random: a module, and what a script does with it, in any order.

A module is one of :mod:`tests.hunt.modules`, or statements of :mod:`tests.hunt.blocks` one after
the other. The same seed makes the same program. Of one that differs from eager, the shortest that
still differs is found by leaving out actions and statements; it is a file that runs.
"""

from __future__ import annotations

import itertools
import linecache
import random
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from string import Template
from typing import Any

import torch

from tests.hunt.actions import ACTIONS, CALLS, CHANGES
from tests.hunt.blocks import LAYERS, LOSSES, RETURNS, STATEMENTS
from tests.hunt.fronts import Counts
from tests.hunt.modules import MODULES, Subject
from tests.hunt.running import agree

ENGINES = ("aten", "onnxruntime")
# Through the backend of `torch.compile`: with an engine, and with Dynamo's settings as they come.
COMPILED = {
    "compiled aten": ("'aten'", "SETTINGS"),
    "compiled onnxruntime": ("'onnxruntime'", "SETTINGS"),
    "compiled plainly": ("'aten'",),
}
# Of which a program has one now and then: options that change no number.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"memory_budget": "least"},
    {"memory_budget": 1.0},
    {"backward_pieces": 3},
    {"certificate": "each size"},
    {"arena": False},
    {"retry": True},
    {"skip_padding": False},
    {"opset": 18},
)

PREAMBLE = """\
import copy, functools, gc, inspect, io, pickle, warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from ortrain import Options
from ortrain.hooks import SubscriberManager
from ortrain.optim import FusedAdam, clip_grad_norm_
from tests.hunt.modules import *
from tests.hunt.parts import *
from tests.hunt.fronts import SETTINGS, Compiled, Wrapped
from tests.hunt.running import agree

"""

# Of the largest value of a tensor: roundings of float32 that a program magnifies make no more.
MAGNIFIED = 1e-2

# What a generated module is called with, and its first statement.
GIVEN = {
    "rows": ("x", "(torch.randn(n, length, 8, dtype=dtype),), {}", ""),
    "rows and a scale": (
        "x, *, scale=1.0",
        "(torch.randn(n, length, 8, dtype=dtype),), {'scale': 0.5 * length}",
        "x = x * scale",
    ),
    "rows and a mask": (
        "x, mask=None",
        "(torch.randn(n, length, 8, dtype=dtype),), masked(n, length)",
        "if mask is not None:\n    x = x.masked_fill(~mask[..., None], 0)",
    ),
    "two": (
        "x, b",
        "(torch.randn(n, length, 8, dtype=dtype), torch.randn(n, 1, 8, dtype=dtype)), {}",
        "x = x * b",
    ),
    "transposed rows": ("x", "(torch.randn(length, n, 8, dtype=dtype).transpose(0, 1),), {}", ""),
    "ids": ("ids", "(torch.randint(0, 11, (n, length)),), {}", "x = self.embedding(ids)"),
}

# What a program is run with by default options: a part that gains as a graph, and steps in which
# one takes over.
WEIGHT = (
    "a part that gains",
    """
self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
self.deep = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
""".strip(),
    "x = x + self.down(self.deep(self.up(x)))",
)
RUN_IN = (
    "many steps",
    """
for number in range(80):
    args, kwargs = s.batch(3, 4)
    s.loss(s.model(*args, **kwargs)).backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.optimizer.param_groups[0]['lr'] = 0.01
""",
)

BREAK = ("graph break", "", STATEMENTS["graph break"])

Lines = tuple[str, str, str]
"""Of a statement: its name, the constructor's lines, the forward's."""


@dataclass(frozen=True)
class Program:
    """A module and a script.

    Attributes:
        seed: that it is made of.
        kind: of the module: a key of ``MODULES``, or empty.
        double: whether the module is in float64.
        actions: names, and their lines.
        certificate: when graphs are compared with the module.
        settings: further options of ``ORTModule``.
        given: what a generated module is called with, a key of ``GIVEN``.
        statements: of a generated module.
        returns: the last one, a key of ``RETURNS``.
    """

    seed: int
    kind: str
    double: bool
    actions: tuple[tuple[str, str], ...]
    certificate: str = "first"
    settings: tuple[tuple[str, Any], ...] = ()
    given: str = "rows"
    statements: tuple[Lines, ...] = ()
    returns: str = "tensor"

    @property
    def names(self) -> list[str]:
        """What it is made of."""
        module = [self.kind] if self.kind else [self.given, *(s[0] for s in self.statements)]
        return [
            *module,
            "|",
            *([] if self.kind else [self.returns, "|"]),
            *(a[0] for a in self.actions),
        ]

    def source(self, engine: str) -> str:
        """The program as a file."""
        body = [
            f"with s.step({f'{place}: {name}'!r}):\n{textwrap.indent(lines.strip(), '    ')}\n"
            for place, (name, lines) in enumerate(self.actions)
        ]
        dtype = "torch.float64" if self.double else "torch.float32"
        subject = f"MODULES[{self.kind!r}]" if self.kind else "SUBJECT"
        asked = f"dtype={dtype}, seed={self.seed}, front={self._front(engine)}"
        return (
            f"{PREAMBLE}\n{'' if self.kind else self._module()}"
            f"def script(s):\n{textwrap.indent(''.join(body) or 'pass', '    ')}\n\n"
            f"if __name__ == '__main__':\n    torch.set_num_threads(1)\n"
            f"    agree(script, {subject}, {asked}, closely=True)\n"
        )

    def _front(self, engine: str) -> str:
        """The way to graphs, as a line of code."""
        if engine in COMPILED:
            return f"Compiled({', '.join(COMPILED[engine])})"
        given = {"engine": engine, "certificate": self.certificate, **dict(self.settings)}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"Wrapped(Options({options}))"

    def _module(self) -> str:
        parameters, batch, first = GIVEN[self.given]
        made = ["super().__init__()", "self.layer = nn.Linear(8, 8)"]
        made += ["self.embedding = nn.Embedding(11, 8)"] if self.given == "ids" else []
        made += [line for _, line, _ in self.statements if line]
        run = [first, "x = self.layer(x)", "hidden = x"]
        run += [line for _, _, line in self.statements]
        run += [RETURNS[self.returns]]
        lines = [textwrap.indent("\n".join(filter(None, each)), " " * 8) for each in (made, run)]
        return (
            f"class Model(nn.Module):\n    def __init__(self):\n{lines[0]}\n\n"
            f"    def forward(self, {parameters}):\n{lines[1]}\n\n\n"
            f"def batch(n, length, dtype):\n    return {batch}\n\n\n"
            f"SUBJECT = Subject(Model, batch, ids={self.given == 'ids'})\n\n\n"
        )

    def run(
        self, engine: str, *, steps_to_come: int | None = None, closely: bool = False
    ) -> Counts:
        """Runs it on both, and compares.

        Args:
            engine: of ``Options``, or a key of ``COMPILED``.
            steps_to_come: what the model is told of.
            closely: whether strides and shared memory of outputs are compared as well.

        Returns:
            The calls that ran as a graph and in PyTorch, and why.

        Raises:
            Difference: they differ.
        """
        with imported(self.source(engine), self.seed) as names:
            front: Any = eval(self._front(engine), names)  # noqa: S307
            if steps_to_come is not None:
                front.steps_to_come = steps_to_come
            subject: Subject = MODULES[self.kind] if self.kind else names["SUBJECT"]
            return agree(
                names["script"],
                subject,
                dtype=torch.float64 if self.double else torch.float32,
                seed=self.seed,
                front=front,
                closely=closely,
            )

    def longer(self) -> Program:
        """It as default options may gain on it: of a module that is made up."""
        actions, statements = (RUN_IN, *self.actions), (WEIGHT, *self.statements)
        return replace(self, actions=actions, statements=statements, kind="")

    def broken(self) -> Program:
        """It with a break of its graph between two statements: of a module that is made up."""
        rows = [row for each in self.statements for row in (each, BREAK)]
        return replace(self, statements=tuple(rows))

    def shorter(self) -> Iterator[Program]:
        """It without some of its actions or statements, the shortest first."""
        for what in ("actions", "statements"):
            rows = getattr(self, what)
            width = max(1, len(rows) // 2)
            while width:
                for at in range(0, len(rows), width):
                    yield replace(self, **{what: rows[:at] + rows[at + width :]})
                width //= 2
        plain: Mapping[str, Any] = {"settings": (), "returns": "tensor", "given": "rows"}
        for what, value in plain.items():
            if getattr(self, what) != value:
                yield replace(self, **{what: value})

    def shortest(self, engine: str, **asked: Any) -> tuple[Program, Exception]:
        """The program without what it takes not to agree, and what differs then.

        Args:
            engine: on which it differs.
            **asked: of :meth:`run`.
        """
        failing, found = self, self._failure(engine, **asked)
        assert found is not None
        again = True
        while again:
            again = False
            for shorter in failing.shorter():
                error = shorter._failure(engine, **asked)
                if error is not None and kind_of(error) == kind_of(found):
                    failing, found, again = shorter, error, True
                    break
        return failing, found

    def _failure(self, engine: str, **asked: Any) -> Exception | None:
        try:
            self.run(engine, **asked)
        except Exception as error:
            return error
        return None


def kind_of(error: Exception) -> str:
    """What a difference is one of: its text without the place, numbers and names."""
    text = re.sub(r"^\d+: [^:]*: ", "", str(error).split("\n")[0])
    apart = getattr(error, "apart", None)
    if apart is not None:
        size = "more" if apart > MAGNIFIED else "less"
        return f"Difference: {text.split(' ')[0].strip(':')}: {size} than {MAGNIFIED} from eager"
    text = re.sub(r"0x[0-9a-f]+|[-+]?\d[\d.e+-]*", "N", text)
    return f"{type(error).__name__}: {text[:160]}"


class imported:  # noqa: N801 - a context
    """A file's names, as if it had been imported: its lines can be read, its classes pickled."""

    def __init__(self, source: str, seed: int) -> None:
        self.source, self.name = source, f"hunted_{next(_NUMBERS)}_{seed}"

    def __enter__(self) -> dict[str, Any]:
        module = types.ModuleType(self.name)
        module.__file__ = f"<{self.name}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[module.__file__] = (len(self.source), None, lines, module.__file__)
        sys.modules[self.name] = module
        exec(compile(self.source, module.__file__, "exec"), module.__dict__)  # noqa: S102
        return module.__dict__

    def __exit__(self, *exc: object) -> None:
        del sys.modules[self.name]
        linecache.cache.pop(f"<{self.name}>", None)


_NUMBERS = itertools.count()


def program(seed: int, *, only: str = "", kind: str | None = None) -> Program:
    """One made up from a seed.

    Args:
        seed: any. Even ones take a module of the table, odd ones make one up.
        only: an action that is in it in any case.
        kind: of the module, empty for one that is made up; by the seed by default.
    """
    draw = random.Random(seed)
    if kind is None:
        kind = "" if seed % 2 else [*MODULES][seed // 2 % len(MODULES)]
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
    made = Program(seed, kind, double, actions, certificate, tuple(settings.items()))
    if kind:
        return made
    count = draw.randint(1, 6)
    return replace(
        made,
        given=draw.choice([*GIVEN]),
        statements=tuple(_statement(number, draw) for number in range(count)),
        returns=draw.choice([*RETURNS]),
    )


def _statement(number: int, draw: random.Random) -> Lines:
    """A layer, a loss or something else."""
    dice = draw.random()
    table: Mapping[str, Any] = LAYERS if dice < 0.35 else LOSSES if dice < 0.4 else STATEMENTS
    return statement(
        draw.choice([*table]),
        number,
        a=draw.choice([0.25, 0.5, 2.0]),
        k=draw.choice([1, 2, 3]),
        flag=draw.choice([True, False]),
        bag=draw.choice(["sum", "mean", "max"]),
    )


def statement(name: str, number: int, **values: Any) -> Lines:
    """The lines of a layer, a loss or a statement.

    Args:
        name: in its table.
        number: of it in the module.
        **values: of the other names in its lines.
    """
    if name in LAYERS:
        made, call = LAYERS[name]
        lines = (f"self.m$i = {made}", f"m = self.m$i\nx = {call}")
    elif name in LOSSES:
        lines = (f"self.m$i = nn.{name}()", f"x = x + self.m$i{LOSSES[name]}")
    else:
        rows = STATEMENTS[name].strip().split("\n")
        made = "\n".join(row[2:] for row in rows if row.startswith("+ "))
        lines = (made, "\n".join(row for row in rows if not row.startswith("+ ")))
    made, call = (Template(each).substitute(values, i=number) for each in lines)
    return name, made, call


def _filled(lines: str, draw: random.Random) -> str:
    return Template(lines).substitute(
        n=draw.choice([2, 2, 3, 4, 5]),
        length=draw.choice([2, 3, 4, 5]),
        which=draw.randrange(12),
        rate=draw.choice([0.03, 0.05, 0.1]),
    )
