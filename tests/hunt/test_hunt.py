"""Programs made up at random, eagerly and with ORTModule: a sample of `make hunt`."""

from __future__ import annotations

from string import Template

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from tests.breadth import sampled
from tests.hunt.__main__ import Worker, made_for, summary, unknown, ways
from tests.hunt.actions import ACTIONS, CALLS
from tests.hunt.blocks import LAYERS, LOSSES, STATEMENTS
from tests.hunt.modules import MODULES, Mlp, Subject
from tests.hunt.programs import ENGINES, Program, imported, kind_of, program, statement
from tests.hunt.running import Difference

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")

# Engines in turn; about two seconds a program.
SAMPLE = range(6)
BREADTH = range(150)


# Of code that raises, what it has assigned is lost (124); and a branch on a mean that is zero but
# for roundings goes either way.
APART = {124}
ACTIONS_APART = {"reentrant checkpoint around it"}


SEEDS = sampled(sorted({*BREADTH} - APART), SAMPLE)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_leaves_after_each_action_what_it_leaves_in_pytorch(seed: int) -> None:
    program(seed).run(ENGINES[seed % len(ENGINES)])


# Of which Dynamo's graphs differ in PyTorch, too, or whose outputs lie otherwise than it thinks.
OTHERS = {61, 85, 91, 96, 116, 124, 131}


@pytest.mark.parametrize("seed", sampled(sorted({*BREADTH} - OTHERS), (3, 4, 17, 51)))
@pytest.mark.filterwarnings("ignore")
def test_it_leaves_the_same_through_the_backend_of_torch_compile(seed: int) -> None:
    way = ways(seed, compiled=True)[0]
    made_for(seed, way).run(way["engine"], closely=True)


@pytest.mark.breadth
@pytest.mark.parametrize("name", [each for each in ACTIONS if each not in ACTIONS_APART])
def test_each_action_stands_in_a_script_of_its_own(name: str) -> None:
    place = list(ACTIONS).index(name)
    program(place, only=name).run(ENGINES[place % len(ENGINES)])


def test_a_program_is_the_same_each_time_and_a_file_that_compiles() -> None:
    made = program(7)
    assert made == program(7)
    compile(made.source("aten"), "<script>", "exec")


class Forgetful(nn.Module):
    """Computes something else in its third call, unseen by any graph."""

    calls: list[int] = []  # noqa: RUF012 - of all of them, which is the defect

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.layer(x) * len(self.calls)  # type: ignore[no-any-return]


def test_a_difference_is_found_and_the_script_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = MODULES["mlp"].batch
    monkeypatch.setitem(MODULES, "forgetful", Subject(Forgetful, batch))
    kept = [(name, "pass") for name in "abc"]
    call = ("call", "args, kwargs = s.batch(2, 2)\ns.see(s.model(*args, **kwargs))")
    made = Program(0, "forgetful", double=False, actions=(*kept, call, *kept))
    with pytest.raises(Difference, match="3: call: result"):
        made.run("aten")
    shorter, error = made.shortest("aten")
    assert [name for name, _ in shorter.actions] == ["call"]
    assert isinstance(error, Difference)


@pytest.mark.parametrize(
    "lines",
    [
        "s.handles.append(torch.nn.modules.module.register_module_forward_hook(lambda *_: None))",
        "torch.set_default_dtype(torch.float64)",
    ],
)
def test_a_script_that_leaves_something_behind_is_an_error(lines: str) -> None:
    hooks = {**global_hooks._global_forward_hooks}
    try:
        with pytest.raises(AssertionError, match="a script leaves"):
            Program(0, "mlp", double=False, actions=(("left", lines),)).run("aten")
    finally:
        torch.set_default_dtype(torch.float32)
        global_hooks._global_forward_hooks.clear()
        global_hooks._global_forward_hooks.update(hooks)


def test_hooks_on_all_modules_go_where_a_call_fails() -> None:
    wrong = ("wrong", "s.model.first.weight.data = torch.ones(8, 2)")
    hooked = ("global hook on modules", Template(ACTIONS["global hook on modules"]))
    lines = hooked[1].substitute(n=2, length=2)
    Program(0, "mlp", double=False, actions=(wrong, (hooked[0], lines))).run("aten")
    assert not global_hooks._global_forward_hooks


@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        (
            "s.inner().first.bias.data[0] += 1e-3 * (s.wrap(s.inner()) is not s.inner())",
            "parameters",
        ),
        ("if s.wrap(s.inner()) is not s.inner(): raise KeyError", "ORTModule raises"),
        ("if s.wrap(s.inner()) is s.inner(): raise KeyError", "eager alone raises"),
        ("if s.wrap(s.inner()) is not s.inner(): torch.rand(1)", "generator"),
        ("if s.wrap(s.inner()) is not s.inner(): s.model.eval()", "modes"),
        ("s.see(torch.ones(2, requires_grad=s.wrap(s.inner()) is s.inner()))", "requires_grad"),
    ],
)
def test_what_differs_is_told(lines: str, seen: str) -> None:
    with pytest.raises(Difference, match=seen):
        Program(0, "mlp", double=False, actions=(("defect", lines),)).run("aten")


DEFECT = """
if isinstance(s.model, torch.nn.Module) and s.model is not s.inner():
    s.inner().layer.weight.data[0] += 1
"""


def test_of_a_module_that_is_made_up_the_statements_that_matter_are_left() -> None:
    step = Template(CALLS["step"]).substitute(n=2, length=3)
    actions = (("step", step), ("defect", DEFECT), ("look", "s.look()"))
    statements = tuple(
        statement(name, i, **VALUES) for i, name in enumerate(("sort", "counter", "weight norm"))
    )
    made = Program(1, "", double=False, actions=actions, statements=statements)
    shorter, error = made.shortest("aten")
    assert [name for name, _ in shorter.actions] == ["defect"]
    assert not shorter.statements
    assert "parameters" in str(error)


VALUES = {"a": 0.5, "k": 1, "flag": True, "bag": "sum"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*STATEMENTS, *LAYERS, *LOSSES])
def test_each_statement_keeps_the_shape_and_trains_in_pytorch(name: str) -> None:
    made = Program(0, "", double=False, actions=(), statements=(statement(name, 0, **VALUES),))
    with imported(made.source("aten"), 0) as names:
        model = names["Model"]()
        for n, length in ((4, 5), (2, 3)):
            args, kwargs = names["batch"](n, length, torch.float32)
            out = model(*args, **kwargs)
            assert out.shape == (n, length, 8)
            out.sum().backward()


def test_a_worker_that_dies_is_told_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    monkeypatch.setattr("tests.hunt.__main__.LIMIT", 0.01)
    assert worker.row(0, {"engine": "aten"})["difference"] == "hangs"
    monkeypatch.undo()
    assert worker.row(0, {"engine": "aten"})["seed"] == 0
    worker.close()


MOVED = "s.inner().layer.weight.data.mul_(1 + 1e-7 * (s.wrap(s.inner()) is not s.inner()))"
CHAOS = """
value = s.inner().layer.weight.detach().sigmoid()
for _ in range(200):
    value = 3.99 * value * (1 - value)
s.see(value)
"""


@pytest.mark.parametrize(("by", "lines"), [(1e-7, CHAOS), (1e-2, "pass")])
def test_roundings_that_a_program_magnifies_are_told(by: float, lines: str) -> None:
    actions = (("moved", MOVED.replace("1e-7", str(by))), ("then", lines))
    with pytest.raises(Difference) as raised:
        Program(1, "", double=False, actions=actions).run("aten")
    assert raised.value.magnified == (lines == CHAOS)
    assert raised.value.apart is not None
    assert raised.value.apart > 1e-3


def test_differences_are_of_two_sizes() -> None:
    large = Difference("0: step: gradients a: 1.0 from eager, whose largest value is 2.0")
    large.apart = 0.5
    assert kind_of(large) == "Difference: gradients: more than 0.01 from eager"


def test_results_are_of_kinds() -> None:
    row = {"engine": "aten", "graph": 3, "eager": 1, "reasons": ["a hook"], "copies": 0}
    other = {**row, "seed": 2, "difference": "Difference: N from eager", "message": "0: step: 1e-2"}
    found = summary([{**row, "seed": 1}, {**other, "names": []}], 1.0)
    assert found["engines"]["aten"]["share of calls that ran as a graph"] == 0.75
    assert found["differences"][0]["programs"] == [[2, "aten"]]
    assert found["reasons"] == {"a hook": {"programs": 2, "one": [1, "aten"]}}
    assert unknown(found["differences"], found["differences"]) == []
    elsewhere = [{"what": found["differences"][0]["what"], "programs": [[2, "onnxruntime"]]}]
    assert unknown(found["differences"], elsewhere) == [[2, "aten"]]


def test_the_tables_have_what_they_should() -> None:
    assert len(MODULES) >= 20
    assert len(ACTIONS) >= 150
    assert isinstance(Mlp()(torch.randn(2, 6)), Tensor)
