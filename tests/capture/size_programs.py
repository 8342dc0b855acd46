"""Random modules whose code depends on the sizes of its inputs, and calls of them.

A program is the source of a forward: a row of statements that branch on sizes, compute with them,
slice, reshape, broadcast and reduce. Each statement was run at the sizes of the first call, so that
the program is valid there; at others it may raise.

    $ python -m tests.capture.size_programs --count 400 --seed 7
"""

from __future__ import annotations

import argparse
import collections
import copy
import math
import random
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument
from torch import Tensor, nn

from ortrain import DebugOptions, LogLevel, Options, ORTModule
from ortrain.frontend.export import export
from tests.capture.running import run

Sizes = tuple[tuple[int, ...], ...]

# Largest difference from eager, relative to the largest value.
TOLERANCE = 1e-4
LARGEST = 4096  # elements of a value: programs square and repeat

NUMBERS = (
    "{d}", "{d}", "{d}", "len({x})", "{x}.numel()", "{n} // 2", "{n} * 2", "{n} - 1",
    "-(-{n} // 2)", "min({n}, {m})", "max({n}, {m})", "max({n} - 2, 1)", "{n} % 3",
    "int({n} * 0.5)", "abs({n} - {m})", "int(math.sqrt({n}))", "round({n} / 3)",
    "({n} + 3) // 4 * 4", "{n} ** 2", "divmod({n}, 2)[0]", "math.ceil({n} / 2)",
    "math.floor({n} / 3)", "{n} >> 1", "{n} & 3", "sum({x}.shape)", "int(float({n}))",
    "math.prod({x}.shape)", "sorted([{n}, {m}])[0]", "{n} // {m}", "-{n} % 4",
    "self.numbers.shape[0] - {n}", "self.weight.numel() + {n}",
)  # fmt: skip
QUESTIONS = (
    "{n} % 2 == 0", "{n} == {m}", "{n} != {m}", "{n} > {k}", "{n} in (4, 8)", "{n} in {{3, 6}}",
    "{n} == 1", "{n} > 1 and {m} > 4", "not {n} % 3", "{n} * 2 <= {m} + 5",
    "{x}.shape == {y}.shape", "{n} < {m} < 9", "bool({n} - 3)", "f'{{{n}}}' == '4'",
    "str({n}) < '5'", "{{4: 1}}.get({n}, 0)", "any(s == 4 for s in {x}.shape)", "{n} / 2 > {m} / 3",
    "{n} * 0.5 > 2", "tuple({x}.shape) > (3, 4)", "{n} == 1 and {m} > 3", "max({n}, {m}) == {n}",
    "{n} or {m} > 3", "math.sqrt({n}) > 2", "isinstance({n}, int) and {n} > 3",
    "type({n}) is int and {n} % 2 == 0", "isinstance({n} / 2, float) and {n} == 4",
    "isinstance({n} == {m}, bool) and {n} != {m}", "isinstance({n}, float) or {m} == 4",
)  # fmt: skip
FACTORS = (
    "{n}", "1.0 / ({n} + 1)", "math.sqrt({m} + 1)", "(2.0 if {q} else 3.0)", "self.table[{n} % 8]",
    "self.by_size.get({n}, 0.5)", "float({n})", "torch.tensor(float({n}))",
    "torch.arange({n}).sum()", "torch.ones({n}).sum()", "torch.full((1,), 1.0 + {n})",
    "torch.tensor([{n}, {m}]).sum()", "self.numbers[{n} % 8]", "self.numbers[: {n}].sum()",
    "torch.linspace(0, 1, {n} + 1).mean()", "self.by_name.get(f'size {{{n}}}', 0.5)",
    "torch.zeros({n}, {m}).shape.numel()",
)  # fmt: skip
STATEMENTS = (
    "v = v * {f}", "v = v + {f}", "v = v * {f}", "v = v * 2 if {q} else v - 1", "v = v[1:]",
    "v = v[: {n}]", "v = v[{n} // 2 :]", "v = v[-2:]", "v = v[::2]", "v = v[..., : -(-{n} // 2)]",
    "v = v.reshape(-1)", "v = v.reshape({d}, -1)", "v = v.reshape(len(v), -1)", "v = v.flatten()",
    "v = v.unsqueeze(0)", "v = v.squeeze(0)", "v = v.squeeze()", "v = v.transpose(0, -1)",
    "v = v + {x}", "v = v * {x}", "v = v + {x}[: len(v)]", "v = v - {x}.mean()", "v = v.sum(0)",
    "v = v.mean(-1)", "v = v.amax(0)", "v = v.max(0).values", "v = v.softmax(0)", "v = v.cumsum(0)",
    "v = torch.cat([v, v[:1]])", "v = torch.stack([v, v])",
    "v = torch.cat([v.flatten(), {x}.flatten()])", "v = v.chunk(2)[0]", "v = v.split(2)[-1]",
    "v = v.unbind(0)[0]", "v = F.pad(v, (0, -{d} % 4))", "v = v.expand({d}, *v.shape)",
    "v = v.repeat(2, *[1] * (v.ndim - 1))", "v = v.flip(0)",
    "v = v.reshape(len(v), -1) @ v.reshape(len(v), -1).T", "v = v.std(0)", "v = v.roll(1, 0)",
    "v = F.log_softmax(v.reshape({d}, -1), 1)[:, 0]", "v = v.narrow(0, 0, {n})",
    "v = v.reshape(len(v), -1) @ {x}.reshape({x}.shape[0], -1).T",
    "v = v.gather(0, torch.zeros_like(v, dtype=torch.long))",
    "v = v.index_select(0, torch.arange(len(v) - 1, -1, -1))", "v = v.unfold(0, 2, 1)",
    "v = v.view(v.shape[0], -1).sum(1)", "v = v.tril()", "v = v[torch.arange({n})]",
    "v = v - v.mean(0, keepdim=True)", "v = v.new_ones({n}, 2).sum() + v", "v = v / v.shape[0]",
    "v = v.view(2, -1)", "v = v.unflatten(0, (2, -1))", "v = v * torch.arange(v.shape[-1])",
    "v = v.masked_fill(torch.ones(v.shape[-1], v.shape[-1]).tril() == 0, 0) if v.ndim > 1 else v",
    "if {q}:\n    v = v[1:] * {f}\nelse:\n    v = v + {f}", "if {q}:\n    v = v.sum(0)",
    "if {q}:\n    v = v + {x}\nelif {q}:\n    v = v * {f}", "for i in range({n}):\n    v = v + i",
    "while len(v) > 3:\n    v = v[::2]", "if {q}:\n    raise ValueError('of such sizes')",
    "assert {q}", "torch._check({n} > {k})", "if v.ndim and v.size(0) > 1:\n    v = v - v.mean(0)",
    "w = {x}.shape[0]\nv = v if w == {k} else v * w", "v = F.avg_pool1d(v.reshape(1, 1, -1), 2)",
    "v = F.interpolate(v.reshape(1, 1, -1), scale_factor=2.0)", "v = v.repeat_interleave(2, 0)",
    "v = F.adaptive_avg_pool1d(v.reshape(1, 1, -1), 2)", "v = v.sort(0).values", "v = v[:, None]",
    "v = torch.where(v > 0, v, {f})", "v = torch.einsum('i...,j...->ij', v, {x})",
)  # fmt: skip


@dataclass(frozen=True)
class SizeProgram:
    """A forward, and the sizes that it is called with.

    Attributes:
        source: of the function ``forward(self, x, …)``.
        calls: sizes of the inputs at each call; the first is one that the program is valid for.
    """

    source: str
    calls: tuple[Sizes, ...]

    def module(self) -> nn.Module:
        """A module that runs it."""
        return Sized(self.source)

    def inputs(self, sizes: Sizes) -> list[Tensor]:
        """Tensors of these sizes, the same each time."""
        generator = torch.Generator().manual_seed(sum(map(sum, sizes)))
        return [torch.randn(shape, generator=generator) for shape in sizes]


class Sized(nn.Module):
    """Runs a forward given as source."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("numbers", torch.linspace(0.5, 2.0, 16))
        self.table = [1.0, 2.0, 0.5, 3.0, 1.5, 0.25, 4.0, 0.75]
        self.by_size = {3: 2.0, 4: 3.0, 8: 0.25}
        self.by_name = {"size 3": 2.0, "size 4": 3.0, "size 8": 0.25}
        names: dict[str, Any] = {"torch": torch, "F": nn.functional, "math": math}
        exec(compile(source, "<program>", "exec"), names)  # noqa: S102
        self.function = names["forward"]

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.function(self, *inputs)
        return output


def programs(count: int, seed: int) -> Iterator[SizeProgram]:
    """Random programs, the same for a seed."""
    for number in range(count):
        yield _Writer(random.Random(f"{seed} {number}")).program()


class _Writer:
    """Writes one program."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.names = ["x", "y", "z"][: draw.choice((1, 1, 2, 2, 3))]
        sizes = {name: draw.choice((2, 3, 4, 5, 6, 8)) for name in "ABC"}
        dims = [[draw.choice("AABC") for _ in range(draw.choice((1, 2, 2, 3)))] for _ in self.names]
        self.sizes, self.dims = sizes, dims

    def program(self) -> SizeProgram:
        first = self.of(self.sizes)
        lines = ["v = x * self.weight"]
        wanted = self.draw.randint(2, 6)
        for _ in range(40):
            if wanted == 0:
                break
            statement = self.fill(self.draw.choice(STATEMENTS)).splitlines()
            if self.runs([*lines, *statement], first):
                lines += statement
                wanted -= 1
        return SizeProgram(self.source(lines), tuple(dict.fromkeys([first, *self.others()])))

    def source(self, lines: list[str]) -> str:
        header = f"def forward(self, {', '.join(self.names)}):"
        return "\n    ".join([header, *lines, "return v"])

    def runs(self, lines: list[str], sizes: Sizes) -> bool:
        program = SizeProgram(self.source(lines), (sizes,))
        try:
            output = program.module()(*program.inputs(sizes))
        except Exception:
            return False
        return 0 < output.numel() < LARGEST and bool(output.isfinite().all())

    def of(self, sizes: dict[str, int]) -> Sizes:
        return tuple(tuple(sizes[name] for name in dims) for dims in self.dims)

    def others(self) -> Iterator[Sizes]:
        """Each dimension larger, smaller, doubled, 1 and 0; inputs that do not match."""
        used = sorted({name for dims in self.dims for name in dims})
        for change in (lambda n: n + 1, lambda n: max(n - 1, 1), lambda n: 2 * n, lambda n: 1):
            name = self.draw.choice(used)
            yield self.of({**self.sizes, name: change(self.sizes[name])})
        yield self.of({name: size + 1 for name, size in self.sizes.items()})
        yield self.of({name: self.draw.randint(1, 9) for name in self.sizes})
        yield self.of(dict.fromkeys(self.sizes, 1))
        yield self.of({**self.sizes, self.draw.choice(used): 0})
        shapes = [list(shape) for shape in self.of(self.sizes)]
        for size in (1, self.draw.randint(2, 9)):
            shape = self.draw.choice(shapes)
            shape[self.draw.randrange(len(shape))] = size
            yield tuple(map(tuple, shapes))

    def fill(self, template: str) -> str:
        """The template with sizes, questions and inputs in its gaps, each drawn anew."""
        while "{" in template.replace("{{", ""):
            gap = next(g for g in "qfnmdxyk" if f"{{{g}}}" in template)
            template = template.replace(f"{{{gap}}}", self.part(gap), 1)
        return template.replace("{{", "{").replace("}}", "}")

    def part(self, gap: str) -> str:
        if gap == "k":
            return str(self.draw.randint(1, 8))
        if gap in "xy":
            return self.draw.choice(self.names)
        if gap == "d":
            i = self.draw.randrange(len(self.names))
            return f"{self.names[i]}.shape[{self.draw.randrange(len(self.dims[i]))}]"
        if gap in "nm":
            number = self.draw.choice(NUMBERS) if self.draw.random() < 0.5 else "{d}"
            return number if number == "{d}" else f"({number})"
        return self.draw.choice(QUESTIONS if gap == "q" else FACTORS)


@dataclass
class Outcome:
    """What a call gave.

    Attributes:
        output: of the module; None where it raised.
        gradient: of its weight.
        error: what it raised.
    """

    output: Tensor | None
    gradient: Tensor | None = None
    error: str = ""

    @classmethod
    def of(cls, module: nn.Module, inputs: list[Tensor]) -> Outcome:
        """Runs a step."""
        module.zero_grad()
        try:
            output = module(*inputs)
            output.sum().backward()
        except Exception as error:
            return cls(None, error=f"{type(error).__name__}: {str(error)[:200]}")
        weight = next(module.parameters())
        return cls(output.detach(), None if weight.grad is None else weight.grad.clone())


def difference(program: SizeProgram, options: Options) -> tuple[str, collections.Counter[str]]:
    """The first difference of a module from itself as a graph, empty for none, and what ran."""
    eager = program.module()
    graph = ORTModule(
        copy.deepcopy(eager), options=options, debug_options=DebugOptions(log_level=LogLevel.ERROR)
    )
    ran: collections.Counter[str] = collections.Counter()
    for sizes in [*program.calls, program.calls[0]]:
        mine = Outcome.of(graph, program.inputs(sizes))
        own = Outcome.of(eager, program.inputs(sizes))
        ran[graph.report.mode if own.output is not None else "raised"] += 1
        told = _told(mine, own)
        if told:
            return f"at {sizes} as {graph.report.mode}: {told}", ran
    ran["captures"] += graph.report.captures
    return "", ran


def misjudged(program: SizeProgram) -> str:
    """The first call that an export of the first one wrongly covers; empty for none.

    Raises:
        CaptureError: there is no program.
    """
    module, first = program.module(), program.inputs(program.calls[0])
    exported = export(module, tuple(first))
    for sizes in program.calls:
        if exported.accepts(sizes):
            inputs = program.inputs(sizes)
            try:
                output, _ = run(exported, module, tuple(inputs), {})
            except (Fail, InvalidArgument):
                continue  # which a step answers in PyTorch
            own = Outcome.of(module, inputs)
            told = _told(Outcome(output, own.gradient), own)
            if told:
                return f"at {sizes}: {told}"
    return ""


def _told(mine: Outcome, own: Outcome) -> str:
    if (mine.output is None) != (own.output is None):
        return f"{mine.error or 'returns'} where eager {own.error or 'returns'}"
    for name, a, b in (
        ("output", mine.output, own.output),
        ("gradient", mine.gradient, own.gradient),
    ):
        if (a is None) != (b is None):
            return f"{name}: {a} instead of {b}"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name}: {a.dtype} {[*a.shape]} instead of {b.dtype} {[*b.shape]}"
        finite = b[b.isfinite()].abs()
        scale = max(1.0, float(finite.max()) if finite.numel() else 1.0)
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True):
            return f"{name}: {a.flatten()[:4].tolist()} instead of {b.flatten()[:4].tolist()}"
    return ""


def main() -> int:
    """Runs programs and prints those that differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one program")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    options = Options(engine="onnxruntime", fallback="torch")
    total: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    for number, program in enumerate(programs(asked.count, asked.seed)):
        if asked.only not in (None, number):
            continue
        told, ran = difference(program, options)
        total += ran
        total["programs"] += 1
        if told:
            total["differ"] += 1
            print(f"--- {number} {told}\n{program.source}", flush=True)
    total["seconds"] = int(time.monotonic() - start)
    print(dict(total))
    return int(bool(total["differ"]))


if __name__ == "__main__":
    sys.exit(main())
