"""Writes in place, views, detached tensors and regions without gradients: eager's numbers, or none.

Programs are drawn at random. What eager runs, a graph computes with the same outputs and gradients,
or capture refuses it. What eager refuses (a view that was made without gradients and written with)
is no concern of a graph's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.errors import CaptureError, ParityError
from ortrain.frontend.export import export
from tests.breadth import crossed
from tests.module.agreement import GRAPH, SAME

PROGRAMS = 32
MOST_REFUSED = PROGRAMS * 6 // 10

VALUES = ["{a} * 2", "{a} + {b}", "{a} * {b}", "torch.tanh({a})", "{a} - {b}.sum()", "{a}.clone()",
          "torch.where({a} > 0, {a}, {b})", "{a} * y0.sum()"]  # fmt: skip
SAME_SHAPE = ["{a}", "{a}.detach()", "{a}.data", "{a}.to(torch.float32)", "{a}.contiguous()",
              "{a}[...]", "{a}.view_as({a})"]  # fmt: skip
WRITES = ["{a}.mul_(0.5)", "{a}.add_({b})", "{a}.zero_()", "{a}.fill_(0.7)", "{a}.clamp_(0.0)",
          "{a}.copy_({b} * 2)", "{a}.masked_fill_({b} > 0, 0.3)", "{a}.tanh_()", "{a}.sub_({b})",
          "{a}.gt_(0.1)", "{a}.le_({b})", "{a} += 1.5", "{a} *= {b}",
          "{a}[{a} > 0.5] = 0.1"]  # fmt: skip
ROW_WRITES = ["{a}[0] = 0.2", "{a}[1:] = 0.4", "{a}[0] = {b}[1]", "{a}[..., 0] *= 3"]
MATRIX_WRITES = ["{a}.detach().mul_(2)", "{a}.data.add_(0.1)", "{a}.t().add_(1)",
                 "{a}.view(-1)[:3].mul_(3)", "{a}.unsqueeze_(0).squeeze_(0)"]  # fmt: skip
Shape = tuple[int, ...]
VIEWS: list[tuple[str, Callable[[Shape], Shape]]] = [
    ("{a}[1]", lambda s: s[1:]),
    ("{a}[:, 1:]", lambda s: (s[0], s[1] - 1)),
    ("{a}[::2]", lambda s: ((s[0] + 1) // 2, s[1])),
    ("{a}.t()", lambda s: s[::-1]),
    ("{a}.reshape(-1)", lambda s: (s[0] * s[1],)),
    ("{a}.unsqueeze(1).squeeze(1)", lambda s: s),
    ("{a}.chunk(2, 0)[0]", lambda s: ((s[0] + 1) // 2, s[1])),
    ("{a}.split([1, {a}.shape[0] - 1], 0)[1]", lambda s: (s[0] - 1, s[1])),
    ("{a}.unbind(0)[-1]", lambda s: s[1:]),
    ("{a}.tensor_split(2)[0]", lambda s: ((s[0] + 1) // 2, s[1])),
]


def source(draw: random.Random) -> str:
    """A forward of two to nine statements on ``x`` and a weight, and some of what it made."""
    live: dict[str, Shape] = {"y0": (4, 4), "y1": (4, 4), "y2": (4, 4)}
    lines = ["y0 = x * self.weight", "y1 = torch.tanh(x)"]
    lines.append(draw.choice(["y2 = self.buffer", "y2 = torch.zeros(4, 4)", "y2 = y0.exp()"]))
    indent = ""
    for _ in range(draw.randint(2, 9)):
        if indent:
            indent = draw.choice(["", indent])
        elif draw.random() < 0.2:
            lines.append("with torch.no_grad():")
            indent = "    "
        a, shape = draw.choice(list(live.items()))
        names = {"a": a, "b": draw.choice([n for n, s in live.items() if s == shape])}
        matrix, made, kind = len(shape) == 2 and min(shape) > 1, shape, draw.random()
        if kind < 0.25:
            text = draw.choice(VALUES)
        elif kind < 0.6 and matrix and draw.random() < 0.7:
            text, change = draw.choice(VIEWS)
            made = change(shape)
        elif kind < 0.6:
            text = draw.choice(SAME_SHAPE)
        else:
            writes = WRITES + (ROW_WRITES if shape[0] > 1 else [])
            writes = writes + (MATRIX_WRITES if matrix else [])
            lines.append(indent + draw.choice(writes).format(**names))
            continue
        lines.append(f"{indent}y{len(live)} = {text.format(**names)}")
        live[f"y{len(live)}"] = made
    chosen = [name for name in live if draw.random() < 0.5] or ["y0"]
    returned = ", ".join(f"{name} * 1.5" for name in chosen)
    lines.append(f"return [{returned}]")
    return "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)


class Written(nn.Module):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.3]))
        self.register_buffer("buffer", torch.full((4, 4), 0.25))
        self.text, made = text, {}
        exec(text, {"torch": torch}, made)  # noqa: S102  (a program that this file has drawn)
        self.body: Callable[[Any, torch.Tensor], Any] = made["forward"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def step(module: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    """Outputs and gradients of one call, then the buffer; a gradient of none is zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 4, generator=generator).requires_grad_()
    outputs = model(x)
    loss = torch.zeros(())
    for output in outputs:
        loss = loss + (output * torch.randn(output.shape, generator=generator)).sum()
    wrt = [x, *module.parameters()]
    if not loss.requires_grad:
        gradients = [torch.zeros_like(t) for t in wrt]
    else:
        found = torch.autograd.grad(loss, wrt, allow_unused=True)
        gradients = [
            torch.zeros_like(t) if g is None else g for g, t in zip(found, wrt, strict=True)
        ]
    return [*(o.detach() for o in outputs), *gradients, *module.buffers()]


def test_programs_of_writes_and_views_agree_or_are_refused() -> None:
    refused = 0
    for seed in range(PROGRAMS):
        text = source(random.Random(seed))
        eager, ours = Written(text), Written(text)
        try:
            want = step(eager, eager)
        except RuntimeError:
            continue
        try:
            got = step(ours, ORTModule(ours, options=GRAPH))
        except (CaptureError, ParityError):  # views under no_grad require gradients, which none get
            refused += 1
            continue
        for mine, its in zip(got, want, strict=True):
            assert torch.allclose(mine, its, rtol=SAME, atol=SAME, equal_nan=True), text
    assert refused <= MOST_REFUSED


HEAD = "def forward(self, x):\n    y = x * self.weight\n"

PAST_AUTOGRAD = {
    "data": "y.data.clamp_(0)",
    "detach": "y.detach().mul_(2)",
    "data of a view": "y.data[0] = 0",
    "a view of data": "y[1:].detach().mul_(2)",
    "no_grad": "with torch.no_grad(): y[0] = 0",
    "a mask": "with torch.no_grad(): y[y > 0] = 0",
    "a view": "with torch.no_grad(): y.view(-1)[:3].zero_()",
    "a gradient into what has none": "z = torch.zeros(4, 4); d = z.detach(); d.add_(y); y = d",
    "a gradient by way of a view": "d = torch.zeros(4, 4).data; d[1:].add_(y[1:]); y = y * d",
    "a gradient that is read on": "d = torch.zeros(4, 4).data; d.add_(y); y = y + d.view(-1).sum()",
    "another view": "z = y.chunk(2, 0)[0]; z.data.add_(1)",
    "detach_": "with torch.no_grad(): y.detach_()",
    "what was read": "z = torch.zeros(4, 4); y = y * z[0]; z.data.add_(1)",
}


@pytest.mark.parametrize("name", PAST_AUTOGRAD)
def test_a_write_past_autograd_is_refused(name: str) -> None:
    text = f"{HEAD}    {PAST_AUTOGRAD[name]}\n    return y\n"
    with pytest.raises(
        CaptureError, match=r"behind autograd's back|shows as well|has no values while it is traced"
    ):
        export(Written(text), (torch.ones(4, 4),))


CONSTANT = {
    "made inside": "with torch.no_grad():\n        m = torch.zeros(4, 4)\n        m[0] = x[1]\n"
    "    y = y * m",
    "made outside": "m = torch.zeros(4, 4)\n    with torch.no_grad():\n        m.add_(y)\n"
    "    y = y * m",
    "a buffer": "with torch.no_grad():\n        self.buffer.mul_(0.9).add_(y.mean(), alpha=0.1)\n"
    "    y = y - self.buffer",
    "a buffer's data": "self.buffer.data.mul_(0.9).add_(y, alpha=0.1)\n    y = y - self.buffer",
    "data of a view": "self.buffer[1:].data.add_(y[1:])\n    y = y - self.buffer",
    "a buffer by way of its data": "d = self.buffer.data\n    d.mul_(0.9).add_(y)\n"
    "    y = y * self.buffer.data",
    "what only an index was taken of": "near = (y @ self.buffer).argmin(1)\n"
    "    self.buffer.data.copy_(self.buffer + y)\n    y = y * self.buffer[near]",
    "detached": "z = torch.zeros(4, 4); z.detach().add_(y); y = y + z",
    "of integers": "m = (y > 0).long()\n    with torch.no_grad():\n        m[0] = 2\n    y = y * m",
}


@pytest.mark.parametrize("name", CONSTANT)
def test_what_has_no_gradient_may_be_written_without_gradients(name: str) -> None:
    text = f"{HEAD}    {CONSTANT[name]}\n    return [y]\n"
    eager, ours = Written(text), Written(text)
    want, got = step(eager, eager), step(ours, ORTModule(ours, options=GRAPH))
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its)


MADE_WITHOUT = {
    "a new tensor": "m = torch.zeros(4, 4)",
    "of a weight": "m = self.weight * x",
    "a view, detached": "m = (self.weight * x).clone().view(-1, 4).detach()",
    "read inside": "m = self.weight * x\n        y = y + m.sum()",
}
GIVEN_ONE = [
    "m += y",
    "m[0] += y[1]",
    "m[y > 0.5] = y[y > 0.5]",
    "m.t().mul_(y)",
    "m[1:].copy_(y[1:])",
]


@pytest.mark.parametrize(("made", "write"), crossed(MADE_WITHOUT, GIVEN_ONE))
def test_what_was_made_without_gradients_has_one_once_it_is_written_to(
    made: str, write: str
) -> None:
    text = (
        f"{HEAD}    with torch.no_grad():\n        {MADE_WITHOUT[made]}\n"
        f"    m = m.to(x.device)\n    {write}\n    return [y + m, m * 3]\n"
    )
    eager, ours = Written(text), Written(text)
    want, got = step(eager, eager), step(ours, ORTModule(ours, options=GRAPH))
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its)


OTHER_NAMES = {
    "a weight": "m = self.weight.detach()",
    "a view of a weight": "m = self.weight.view(2, 2).detach().view(-1)",
    "another tensor": "m = self.weight * 2\n        n = m.detach()",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_what_has_other_names_is_not_written_to_by_one(name: str) -> None:
    text = f"{HEAD}    n = y\n    with torch.no_grad():\n        {OTHER_NAMES[name]}\n"
    text = f"{text}    m += y[0]\n    return [m * 3 + n]\n"
    with pytest.raises(CaptureError):
        export(Written(text), (torch.ones(4, 4),))


def test_what_a_region_without_gradients_returns_unchanged_keeps_its_gradient() -> None:
    text = (
        f"{HEAD}    with torch.no_grad():\n"
        "        z = y.contiguous()\n        v = y.float()\n        u = y * 2\n"
        "    a = y.float()\n    with torch.no_grad():\n"
        "        b = a.float().contiguous()\n        c = y.to(torch.float32)\n"
        "    return [z * y, v * 3, u * y, a * 2, b * 5, c * 7]\n"
    )
    eager, ours = Written(text), Written(text)
    want, got = step(eager, eager), step(ours, ORTModule(ours, options=GRAPH))
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its)


OVERWRITES = [
    "y.gt_(0.5)", "y.le_(z)", "y.ne_(z[0])", "y.uniform_()", "y.normal_()", "y.exponential_()",
    "y.bernoulli_(0.5)", "y.bernoulli_(z.sigmoid())", "y.geometric_(0.5)", "y.log_normal_()",
    "y.cauchy_()", "y.copy_(z)", "y.fill_(2.0)", "y.fill_(z.sum())", "y.zero_()", "y.sign_()",
]  # fmt: skip


@pytest.mark.parametrize("write", OVERWRITES)
def test_what_is_overwritten_has_a_gradient_of_zeros_and_not_none(write: str) -> None:
    text = f"{HEAD}    z = x.detach().exp() * x.new_ones(4)\n    {write}\n    return [y * 2]\n"
    eager, ours = Written(text), Written(text)
    model = ORTModule(ours, options=GRAPH)
    gradients = []
    for module, run in ((eager, eager), (ours, model)):
        x = torch.randn(4, 4, requires_grad=True)
        run(x)[0].sum().backward()
        gradients.append([x.grad, module.weight.grad])
    for mine, its in zip(*gradients, strict=True):
        assert mine is not None
        assert torch.equal(mine, its)
        assert not mine.any()


BOTH = ["y.gt_(0.1)", "y.zero_()", "y.copy_(z)", "y.eq_(z)", "y.mul_(2)"]
SEEN = ["y.view_as(y)", "y[...]", "y.t()", "y[1]", "y[:, 1:]", "y.reshape(-1)", "y.unsqueeze(0)"]


@pytest.mark.parametrize(("first", "view"), crossed(BOTH, SEEN, one_in=3))
def test_a_view_shows_what_is_written_and_what_is_written_to_it(first: str, view: str) -> None:
    for second in ("v.le_(0.3)", "v.mul_(3)", "v.fill_(0.2)"):
        text = (
            f"{HEAD}    z = x.exp()\n    v = {view}\n    {first}\n    {second}\n"
            "    return [y * 1.5, v * 1.5]\n"
        )
        eager, ours = Written(text), Written(text)
        want, got = step(eager, eager), step(ours, ORTModule(ours, options=GRAPH))
        for mine, its in zip(got, want, strict=True):
            torch.testing.assert_close(mine, its)


PIECES = ["chunk(2, 0)[0]", "chunk(3, 1)[-1]", "split(3, 0)[1]", "split([1, 3], 1)[0]",
          "unbind(0)[2]", "unbind(1)[-1]", "tensor_split(3)[0]", "tensor_split([1, 2])[1]",
          "hsplit(2)[1]", "vsplit([1])[0]", "t().chunk(2)[1]", "chunk(2)[1].t()[1:]"]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "piece"), crossed(["self.buffer", "torch.zeros(4, 4)"], PIECES, one_in=2)
)
def test_what_is_written_into_a_piece_is_in_the_whole(written: str, piece: str) -> None:
    lines = [f"z = {written}", "with torch.no_grad():", f"    z.{piece}.add_(1)", "return x * z"]
    text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)
    eager, ours = Written(text), Written(text)
    model = ORTModule(ours, options=GRAPH)
    for _ in range(2):
        for found, expected in zip(step(ours, model), step(eager, eager), strict=True):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours.buffer, eager.buffer)
    assert model.report.eager_calls == 0


@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_into_a_slice_with_a_step_is_eagers(seed: int) -> None:
    draw = random.Random(seed)

    def piece() -> str:
        bounds = [draw.choice(["", "0", "1", "2", "-3"]), draw.choice(["", "3", "4", "-1", "9"])]
        return ":".join([*bounds, draw.choice("1234")])

    lines = ["z = x * self.weight"]
    for _ in range(3):
        where = draw.choice([piece(), f":, {piece()}", f"{piece()}, {piece()}", f"..., {piece()}"])
        value = draw.choice([f"= x[{where}].exp()", "= 0.5", f"= x[{where}] * x.sum()", "*= 2"])
        lines.append(f"z[{where}] {value}")
    text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in [*lines, "return [z]"])
    eager, ours = Written(text), Written(text)
    want, got = step(eager, eager), step(ours, ORTModule(ours, options=GRAPH))
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its)


CUTS = ["y[:1]", "y[1:3]", "y[2:]", "y[:, :2]", "y[:, 2:]", "y[0]", "y[3]", "y[-1]", "y[:, 1]",
        "y.narrow(0, 1, 2)", "y[:3].t()"]  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
def test_pieces_that_are_written_one_after_another_are_eagers(seed: int) -> None:
    """What has no number in common with a written piece is read past the write."""
    draw = random.Random(seed)
    names = [f"v{i}" for i in range(3)]
    lines = ["y = x * self.weight", *(f"{name} = {draw.choice(CUTS)}" for name in names)]
    lines += [
        f"{draw.choice(names)}.{draw.choice(['mul_(2)', 'add_(0.3)', 'neg_()'])}" for _ in range(3)
    ]
    read = draw.sample([*names, "y", draw.choice(CUTS)], draw.randint(1, 3))
    text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)
    text += f"    return [{', '.join(f'{name} * 1.5' for name in read)}]\n"
    eager, ours = Written(text), Written(text)
    model = ORTModule(ours, options=GRAPH)
    for mine, its in zip(step(ours, model), step(eager, eager), strict=True):
        torch.testing.assert_close(mine, its)
    assert model.report.eager_calls == 0


@pytest.mark.parametrize(
    "cut", ["unsafe_chunk(2, -1)", "unsafe_split(2)", "unsafe_split_with_sizes([1, 3])"]
)
def test_pieces_that_autograd_takes_for_tensors_may_be_written(cut: str) -> None:
    text = (
        f"def forward(self, x):\n    a, b = (x * self.weight).{cut}\n"
        "    a.sigmoid_()\n    b.tanh_()\n    return [a, b * a.sum()]\n"
    )
    eager, ours = Written(text), Written(text)
    model = ORTModule(ours, options=GRAPH)
    for mine, its in zip(step(ours, model), step(eager, eager), strict=True):
        torch.testing.assert_close(mine, its)
    assert model.report.eager_calls == 0


# What shows a tensor of shape (3, 4, 4) in another way, and not necessarily all of it.
ANY_VIEW = [
    "permute(2, 0, 1)", "permute(-2, -1, 0)", "transpose(0, 2)", "movedim(0, 2)",
    "movedim((0, 1), (2, 0))", "moveaxis(-1, 0)", "swapaxes(0, 1)", "swapdims(0, -1)", "mT", "mH",
    "adjoint()", "unflatten(1, (2, 2))", "view_as(x)", "reshape_as(x)", "ravel()", "flatten(1)",
    "unsqueeze(0).unsqueeze(2).squeeze((0, 2))", "narrow(1, 1, 2)", "narrow(2, -3, 2)",
    "narrow(1, -2, 2)", "diagonal(0, 1, 2)", "diagonal(1, 0, 2)", "diagonal(-2, 2, 1)",
    "diagonal(-1)",
]  # fmt: skip


@pytest.mark.parametrize("seed", crossed(range(16), one_in=2))
def test_what_is_written_through_views_of_views_is_eagers(seed: int) -> None:
    draw = random.Random(seed)
    lines = ["y = x * self.weight", "z = y.exp()"]
    for _ in range(3):
        view = f"y.{draw.choice(ANY_VIEW)}"
        while draw.random() < 0.4:
            view += draw.choice([".movedim(0, -1)", "[-1:]", ".narrow(0, 0, 1)", "[..., 0]"])
        write = draw.choice(["mul_(0.5)", "fill_(0.3)", "sin_()", "div_(3)", "pow_(2)", "add_(1)"])
        lines += [f"{view}.{write}", "z = z + y * 0.5"]
    text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in [*lines, "return z, y"])
    eager, ours = Written(text), Written(text)
    found = []
    for module, run in ((eager, eager), (ours, ORTModule(ours, options=GRAPH))):
        x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        outputs = run(x)
        (outputs[0] * outputs[1]).sum().backward()
        found.append([*outputs, x.grad, module.weight.grad])
    for its, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME)


@pytest.mark.parametrize(
    ("written", "view"), crossed(["y", "x.new_zeros(3, 4, 4)"], ANY_VIEW, one_in=2)
)
def test_what_is_written_to_a_view_is_in_the_whole(written: str, view: str) -> None:
    text = (
        f"def forward(self, x):\n    y = x * self.weight\n    z = {written}\n"
        f"    z.{view}.mul_(2).add_(0.5)\n    return [z * y]\n"
    )
    eager, ours = Written(text), Written(text)
    model, found = ORTModule(ours, options=GRAPH), []
    for module, run in ((ours, model), (eager, eager)):
        x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        (output,) = run(x)
        output.square().sum().backward()
        found.append([output, x.grad, module.weight.grad])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME)
    assert model.report.eager_calls == 0


# In place and not, an operator of one overload's name takes other arguments.
IN_PLACE = ["pow_(2)", "pow_(z)", "ldexp_(z.round())",
            "remainder_(0.7)", "fmod_(z)", "lerp_(z, 0.3)", "lerp_(z, z)",
            "addcmul_(z, z)", "addcdiv_(z, z, value=2)", "clamp_(z, z + 1)", "xlogy_(z)",
            "atan2_(z)", "fill_diagonal_(7)", "tril_(-1)",
            "triu_(1)"]  # fmt: skip


@pytest.mark.parametrize("write", IN_PLACE)
def test_an_operator_in_place_is_the_one_of_its_arguments(write: str) -> None:
    text = f"{HEAD}    y, z = y * 0.5 + 3, x.exp()\n    y.{write}\n    return [y * 1.5]\n"
    eager, ours = Written(text), Written(text)
    want, got = step(eager, eager), step(ours, ORTModule(ours, options=GRAPH))
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME)
