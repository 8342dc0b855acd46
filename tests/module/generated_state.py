"""Modules made up at random whose state holds one thing at a random place.

By hand, for more than the suite runs: ``python -m tests.module.generated_state 600``.
"""

from __future__ import annotations

import random
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

ENGINE = Options(engine="onnxruntime", fallback="torch")

PREAMBLE = """
from __future__ import annotations
import enum, functools, random, weakref
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
import numpy as np
import torch
from torch import nn

class Level(enum.Enum):
    low = 1.5
    high = 2.5

class Plain:
    def __init__(self, v): self.v = v

class Slotted:
    __slots__ = ("v", "other")
    def __init__(self, v): self.v = v

class SlottedChild(Slotted):
    __slots__ = ("more",)

@dataclass
class Data:
    v: object

@dataclass(slots=True)
class SlottedData:
    v: object

class Record(dict):
    @property
    def v(self): return self["v"]
    @v.setter
    def v(self, value): self["v"] = value

class Marked(list):
    pass

class Lazy:
    def __init__(self, v): self._v = v
    @property
    def v(self): return self._v
    @v.setter
    def v(self, value): self._v = value

Named = namedtuple("Named", ["n", "v"])
"""

# How one thing is put into another, how it is reached there, and whether it can be replaced there.
WRAPPERS = [
    ("[0, {}]", "{}[1]", True),
    ("{{'k': {}}}", "{}['k']", True),
    ("OrderedDict(a=1, k={})", "{}['k']", True),
    ("deque([{}, 2])", "{}[0]", True),
    ("SimpleNamespace(v={})", "{}.v", True),
    ("Plain({})", "{}.v", True),
    ("Slotted({})", "{}.v", True),
    ("SlottedChild({})", "{}.v", True),
    ("Data({})", "{}.v", True),
    ("SlottedData({})", "{}.v", True),
    ("Record(v={})", "{}.v", True),
    ("Marked([{}])", "{}[0]", True),
    ("Lazy({})", "{}.v", True),
    ("(0, {})", "{}[1]", False),
    ("Named(0, {})", "{}.v", False),
]
# A value, another one or how to change it in place, and the number that the forward makes of it.
LEAVES = [
    ("1.5", "= 2.5", "{}"),
    ("2", "= 3", "float({})"),
    ("True", "= False", "(2.0 if {} else 1.0)"),
    ("'ab'", "= 'abc'", "float(len({}))"),
    ("None", "= 2.0", "({0} or 1.0)"),
    ("Level.low", "= Level.high", "{}.value"),
    ("np.float32(1.5)", "= np.float32(2.5)", "float({})"),
    ("[1, 2]", ".append(3)", "float(sum({}))"),
    ("[1, 2]", "[0] = 5", "float(sum({}))"),
    ("{1, 2}", ".add(3)", "float(len({}))"),
    ("deque([1, 2], maxlen=2)", ".append(3)", "float(sum({}))"),
    ("{'a': 1.5}", "['a'] = 2.5", "{}['a']"),
    ("torch.tensor([1., 2., 3., 4.])", ".mul_(2)", "{}"),
    ("torch.tensor([1., 2., 3., 4.])", ".data.mul_(2)", "{}"),
    ("torch.tensor([1., 2., 3., 4.])", "= torch.ones(4) * 3", "{}"),
    ("np.ones(4, np.float32)", "[:] = 3", "torch.from_numpy({})"),
    ("np.ones(4, np.float32)", "= np.zeros(4, np.float32)", "torch.from_numpy({})"),
    ("bytearray(b'ab')", ".append(1)", "float(len({}))"),
]
# What a forward may write to the same things.
WRITES = [
    ("1.5", "+= 1.0", "{}"),
    ("2", "+= 1", "float({})"),
    ("True", "= not {0}", "(2.0 if {} else 1.0)"),
    ("None", "= x.detach().mean(0)", "1.0"),
    ("None", "= ({0} or 0) + 1", "float({})"),
    ("[1, 2]", ".append(3)", "float(sum({}))"),
    ("{1, 2}", ".add(len({0}) + 5)", "float(len({}))"),
    ("deque([1, 2], maxlen=2)", ".append(sum({0}))", "float(sum({}))"),
    ("{'a': 1.5}", "['a'] += 1", "{}['a']"),
    ("{}", "[len({0})] = x.detach()", "float(len({}))"),
    ("torch.tensor([1., 2., 3., 4.])", ".mul_(2)", "{}"),
    ("torch.tensor([1., 2., 3., 4.])", "= {0} * 2", "{}"),
    ("np.ones(4, np.float32)", "[0] += 1", "torch.from_numpy({}.copy())"),
    ("random.Random(3)", ".random()", "{}.random()"),
]
MAKE = """
def make():
    box = BOX0
    def fetch(): return box
    def store(v):
        nonlocal box
        box = v
    return fetch, store
"""
HOLDER = """
class Holder:
    def __init__(self): self.box = BOX0
"""
# Where it lies: lines of the class, of the file, of __init__; statements of forward; how forward
# reaches it, and how the test does (`m` the module, `g` the file).
ROOTS = {
    "attribute": ("", "", "self.box = BOX0", "", "self.box", "m.box"),
    "attribute of a child": ("", "", "self.layer.box = BOX0", "", "self.layer.box", "m.layer.box"),
    "attribute of a child in a list": (
        "", "", "self.parts = [nn.Identity()]; self.parts[0].box = BOX0", "",
        "self.parts[0].box", "m.parts[0].box",
    ),
    "class attribute": ("box = BOX0", "", "", "", "self.box", "type(m).box"),
    "attribute of the class": ("box = BOX0", "", "", "", "Model.box", "g['Model'].box"),
    "inherited attribute": ("", "Base.box = BOX0", "", "", "type(self).box", "g['Base'].box"),
    "global": ("", "BOX = BOX0", "", "", "BOX", "g['BOX']"),
    "global of a function": (
        "", "BOX = BOX0\ndef fetch(): return BOX", "", "", "fetch()", "g['BOX']",
    ),
    "global of a method": (
        "def fetch(self): return (lambda: BOX)()", "BOX = BOX0", "", "", "self.fetch()", "g['BOX']",
    ),
    "another file": (
        "", "settings.box = BOX0", "", "", "settings.box", "g['settings'].box",
    ),
    "class as a namespace": (
        "", "class Config:\n    box = BOX0", "", "", "Config.box", "g['Config'].box",
    ),
    "closure": (
        "", MAKE + "fetch, store = make()",
        "", "", "fetch()", "closure",
    ),
    "closure in an attribute": (
        "", MAKE,
        "self.fetch, self.store = make()", "", "self.fetch()", "closure of m",
    ),
    "default": (
        "", "def fetch(box=BOX0): return box", "", "", "fetch()", "default",
    ),
    "function attribute": (
        "", "def fetch(): return fetch.box\nfetch.box = BOX0", "", "", "fetch()", "g['fetch'].box",
    ),
    "partial": (
        "", "def pick(box): return box", "self.fetch = functools.partial(pick, box=BOX0)", "",
        "self.fetch()", "m.fetch.keywords['box']",
    ),
    "bound method": (
        "", HOLDER + "    def fetch(self): return self.box",
        "self.fetch = Holder().fetch", "", "self.fetch()", "m.fetch.__self__.box",
    ),
    "callable object": (
        "", HOLDER + "    def __call__(self): return self.box",
        "self.fetch = Holder()", "", "self.fetch()", "m.fetch.box",
    ),
    "weak reference": (
        "", "", "self.kept = Plain(BOX0); self.weak = weakref.ref(self.kept)", "",
        "self.weak().v", "m.kept.v",
    ),
    "weak reference to a global": (
        "", "KEPT = Plain(BOX0)\nWEAK = weakref.ref(KEPT)", "", "", "WEAK().v", "g['KEPT'].v",
    ),
    "property": (
        "@property\n    def box(self): return self.config.box", "",
        "self.config = SimpleNamespace(box=BOX0)", "", "self.box", "m.config.box",
    ),
    "getattr": ("", "", "self.box = BOX0", "", "getattr(self, 'box')", "m.box"),
    "loop": ("", "", "self.me = SimpleNamespace(box=BOX0); self.me.me = self.me", "",
             "self.me.me.me.box", "m.me.box"),
}  # fmt: skip


@dataclass
class Program:
    """A file with a class ``Model``, and what is done between the calls.

    Attributes:
        title: what it is.
        source: of the file.
        change: run with ``m``, the module, and ``g``, the file; empty where forward itself writes.
        look: an expression for the value, as the test sees it.
    """

    title: str
    source: str
    change: str
    look: str

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """The module and the globals of its file, which no other program shares."""
        file = types.ModuleType("generated_by_a_test")
        vars(file)["settings"] = types.ModuleType("generated_settings")
        sys.modules[file.__name__] = file  # where dataclasses look
        try:
            exec(compile(self.source, "<generated>", "exec"), vars(file))  # noqa: S102
        finally:
            del sys.modules[file.__name__]
        torch.manual_seed(0)
        return vars(file)["Model"](), vars(file)

    def look_at(self, module: nn.Module, file: dict[str, Any]) -> Any:
        """The value at the place."""
        return eval(self.look, {"m": module, "g": file})  # noqa: S307

    def run(self, calls: int = 4) -> str:
        """Calls both engines in turn, changing the state in between.

        Returns:
            The mode of the graph's last call.
        """
        mine, my_file = self.build()
        eager, file = self.build()
        model = ORTModule(mine, options=ENGINE)
        for call in range(calls):
            x = torch.arange(8.0).reshape(2, 4) + call
            with torch.no_grad():
                ours, expected = model(x), eager(x)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
            same = _plain(self.look_at(mine, my_file)), _plain(self.look_at(eager, file))
            assert same[0] == same[1], f"{self.title}: {same[0]} where eager has {same[1]}"
            if self.change and call in (1, 2):
                for module, own in ((mine, my_file), (eager, file)):
                    exec(self.change, {**own, "m": module, "g": own})  # noqa: S102
        return model.report.mode


def _plain(value: Any) -> Any:
    """A value that can be compared and printed."""
    if isinstance(value, Tensor):
        return type(value).__name__, value.tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, random.Random):
        return hash(value.getstate())
    return repr(value)


def program(seed: int, *, writes: bool) -> Program:
    """One made up from a seed."""
    draw = random.Random(seed)
    names = list(ROOTS)
    root = names[seed % len(names)]
    in_class, in_file, in_init, prologue, reached, seen = ROOTS[root]
    leaf, change, number = draw.choice(WRITES if writes else LEAVES)
    wrappers = [draw.choice(WRAPPERS) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    replaces = change.lstrip().startswith(("=", "+="))
    if replaces:  # the innermost place must take another value
        if wrappers and not wrappers[-1][2]:
            wrappers[-1] = draw.choice([w for w in WRAPPERS if w[2]])
        fixed = (
            "fetch()" in reached
            or "getattr" in reached
            or "()" in seen
            or seen.startswith(("closure", "default"))
        )
        if not wrappers and (fixed or "partial" in root):
            wrappers = [draw.choice([w for w in WRAPPERS if w[2]])]
    box, access = leaf, "{}"
    for build, *_ in reversed(wrappers):
        box = build.format(box)
    for _, reach, _ in wrappers:
        access = reach.format(access)
    fetch = {
        "closure": "g['fetch']()", "closure of m": "m.fetch()",
        "default": "g['fetch'].__defaults__[0]",
    }.get(seen, seen)  # fmt: skip
    inner, outer = access.format(reached), access.format(fetch)
    act = f"{inner} {change.format(inner)}" if replaces else f"{inner}{change.format(inner)}"
    done = f"{outer} {change.format(outer)}" if replaces else f"{outer}{change.format(outer)}"
    lines = [
        PREAMBLE,
        "class Base(nn.Module):\n    pass",
        in_file.replace("BOX0", box),
        "class Model(Base):",
        f"    {in_class.replace('BOX0', box)}" if in_class else "",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.layer = nn.Linear(4, 4)",
        f"        {in_init.replace('BOX0', box)}" if in_init else "",
        "    def forward(self, x):",
        f"        {prologue}" if prologue else "",
        "        global BOX" if writes and reached == "BOX" else "",
        f"        {act}" if writes else "",
        f"        return self.layer(x) * {number.format(inner)}",
    ]
    path = " in ".join([leaf, *(w[0] for w in reversed(wrappers))])
    title = f"{seed}: {path}, {root}, {'forward' if writes else 'the test'}: {change}"
    return Program(title, "\n".join(lines), "" if writes else done, outer)


def main(count: int) -> None:
    """Runs programs of both kinds, and prints those that fail."""
    modes: dict[tuple[bool, str], int] = {}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(count):
        for writes in (False, True):
            made = program(seed, writes=writes)
            try:
                mode = made.run()
            except Exception as error:
                mode = "failed"
                print(f"{made.title}\n    {type(error).__name__}: {str(error)[:300]}", flush=True)
            modes[writes, mode] = modes.get((writes, mode), 0) + 1
            if mode == ("eager", "graph")[writes]:
                print(f"{mode}: {made.title}", flush=True)
    for (writes, mode), number in sorted(modes.items()):
        print("forward writes" if writes else "changed between calls", mode, number)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
