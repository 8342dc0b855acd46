"""Objects of a script's own classes among arguments and results: images with masks, batches."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule


class Masked:
    """Tensors with a mask, as detectors pass them."""

    def __init__(self, tensors: Tensor, mask: Tensor | None) -> None:
        self.tensors, self.mask = tensors, mask

    def decompose(self) -> tuple[Tensor, Tensor | None]:
        """Both."""
        return self.tensors, self.mask

    @property
    def width(self) -> int:
        """Of the tensors."""
        return self.tensors.shape[-1]


class Holding:
    """Has another record, a number and a word."""

    def __init__(self, inner: Masked, factor: float = 2.0, kind: str = "sum") -> None:
        self.inner, self.factor, self.kind = inner, factor, kind


class Layer(nn.Module):
    """Reads what it is given in one way or another."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, given: Any) -> Any:
        return self.layer(self.read(given))


def _masked() -> Masked:
    return Masked(torch.randn(2, 4), torch.ones(2, 4))


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a mask": (_masked, lambda b: b.tensors * b.mask),
    "its methods": (_masked, lambda b: b.decompose()[0] * b.width),
    "no mask": (lambda: Masked(torch.randn(2, 4), None), lambda b: b.tensors),
    "a namespace": (lambda: SimpleNamespace(x=torch.randn(2, 4), n=3), lambda b: b.x * b.n),
    "arguments": (lambda: Namespace(x=torch.randn(2, 4)), lambda b: b.x),
    "one in another": (
        lambda: Holding(_masked()),
        lambda b: b.inner.tensors * b.factor + (b.kind == "sum"),
    ),
    "some in a list": (
        lambda: [_masked(), {"more": _masked()}],
        lambda b: b[0].tensors + b[1]["more"].mask,
    ),
    "a list in one": (
        lambda: SimpleNamespace(xs=[torch.randn(2, 4)] * 2),
        lambda b: torch.stack(b.xs).sum(0),
    ),
}


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("case", CASES)
def test_what_they_hold_are_inputs(case: str, engine: Any) -> None:
    torch.manual_seed(0)
    make, read = CASES[case]
    module = Layer(read)
    eager = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    for _ in range(2):
        given = make()
        output = model(given)
        torch.testing.assert_close(output, eager(given))
        output.sum().backward()
    assert (model.report.captures, model.report.graph_calls) == (1, 2)


def test_constants_that_they_hold_are_watched() -> None:
    model = ORTModule(Layer(CASES["one in another"][1]), options=Options(engine="aten"))
    for factor, kind in ((2.0, "sum"), (2.0, "mean"), (3.0, "sum")):
        given = Holding(_masked(), factor, kind)
        torch.testing.assert_close(model(given), model.module(given))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_results_are_of_their_classes(engine: Any) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given: Masked) -> Any:
            return Holding(Masked(self.layer(given.tensors), given.mask), 0.5), "text"

    model = ORTModule(Returning(), options=Options(engine=engine, fallback="raise"))
    for _ in range(2):
        given = _masked()
        found, text = model(given)
        assert (type(found), type(found.inner), found.factor, text) == (
            Holding,
            Masked,
            0.5,
            "text",
        )
        assert found.inner.mask is given.mask
        torch.testing.assert_close(found.inner.tensors, model.module.layer(given.tensors))
        found.inner.tensors.sum().backward()


def test_what_the_forward_sets_is_there() -> None:
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given: Any) -> Tensor:
            given.embedding = self.layer(given.tensors)
            del given.mask
            result: Tensor = given.embedding.sum()
            return result

    model = ORTModule(Setting(), options=Options(engine="aten", fallback="raise"))
    for _ in range(2):
        given: Any = _masked()
        loss = model(given)
        assert sorted(vars(given)) == ["embedding", "tensors"]
        torch.testing.assert_close(given.embedding.sum(), loss)
    assert model.report.graph_calls == 2


class Handle:
    """Nothing that a graph computes with."""

    def run(self) -> None:
        """Does nothing."""


def _in_itself() -> Any:
    record = SimpleNamespace(x=torch.randn(2, 4))
    record.around = [record]
    return record


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimpleNamespace(x=torch.randn(2, 4), handle=Handle()),
        lambda: SimpleNamespace(x=torch.randn(2, 4), run=Handle().run),
        _in_itself,
    ],
    ids=["an object", "a bound method", "itself"],
)
def test_one_that_holds_more_is_an_argument_as_well(make: Callable[[], Any]) -> None:
    model = ORTModule(Layer(lambda b: b.x), options=Options(engine="aten"))
    for _ in range(2):
        given = make()
        torch.testing.assert_close(model(given), model.module(given))
    assert model.report.graph_calls == 2


FACTOR = 2.0


class Scaled:
    """Its code reads a global, and a constant of its class."""

    power = 1

    def __init__(self) -> None:
        self.x = torch.randn(2, 4)

    @property
    def scaled(self) -> Tensor:
        """What the module reads."""
        return self.x**self.power * FACTOR


@dataclass
class ScaledRecord:
    """The same as a dataclass."""

    x: Tensor = field(default_factory=lambda: torch.randn(2, 4))
    power = 1
    scaled = Scaled.scaled


class ScaledDict(UserDict[str, Tensor]):
    """And as a dictionary."""

    power = 1
    scaled = Scaled.scaled

    @property
    def x(self) -> Tensor:
        """Its entry."""
        return self["x"]


@pytest.mark.parametrize(
    "make",
    [Scaled, ScaledRecord, lambda: [ScaledDict(x=torch.randn(2, 4))]],
    ids=["an object", "a dataclass", "a dictionary"],
)
def test_what_the_code_of_their_classes_reads_is_watched(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    model = ORTModule(
        Layer(lambda b: (b[0] if isinstance(b, list) else b).scaled), options=Options(engine="aten")
    )

    def check() -> None:
        for _ in range(2):
            given = make()
            torch.testing.assert_close(model(given), model.module(given))

    check()
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    check()
    made = make()
    monkeypatch.setattr(type(made[0] if isinstance(made, list) else made), "power", 2)
    check()
    assert model.report.captures == 3


def _fresh(kind: str) -> type:
    """A class that no call has met."""
    match kind:
        case "a class":
            return type("Pair", (Masked,), {})
        case "a dataclass":
            return make_dataclass("Pair", ["tensors", "mask"])
        case "a namespace":
            return type(
                "Pair",
                (SimpleNamespace,),
                {"__init__": lambda self, x, y: SimpleNamespace.__init__(self, tensors=x, mask=y)},
            )
        case _:
            return type("Pair", (_UserPair,), {})


class _UserPair(UserDict[str, Tensor]):
    def __init__(self, tensors: Tensor, mask: Tensor) -> None:
        super().__init__(tensors=tensors, mask=mask)

    @property
    def tensors(self) -> Tensor:
        return self["tensors"]

    @property
    def mask(self) -> Tensor:
        return self["mask"]


ARRANGED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "a list": (lambda a, b: [a, b], lambda b: b),
    "a dictionary": (lambda a, b: {"one": a, "two": b}, lambda b: (b["one"], b["two"])),
    "containers": (lambda a, b: [a, {"more": (b,)}], lambda b: (b[0], b[1]["more"][0])),
    "another record": (
        lambda a, b: SimpleNamespace(one=a, two=[b]),
        lambda b: (b.one, b.two[0]),
    ),
}


@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("kind", ["a class", "a dataclass", "a namespace", "a tokenizer's"])
def test_two_of_a_class_that_is_new_stand_in_one_call(kind: str, arranged: str) -> None:
    made: Any = _fresh(kind)
    returned = Masked if issubclass(made, UserDict) else made  # a graph returns no such dictionary
    put, take = ARRANGED[arranged]

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given: Any) -> Any:
            one, two = take(given)
            sums = self.layer(one.tensors + two.mask)
            return put(returned(sums, two.mask), returned(sums * 2, one.mask))

    torch.manual_seed(0)
    model: Any = ORTModule(Adding(), options=Options(engine="aten", fallback="raise"))
    for _ in range(2):
        given = put(*(made(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)))
        for mine, expected in zip(take(model(given)), take(model.module(given)), strict=True):
            assert type(mine) is returned
            torch.testing.assert_close(mine.tensors, expected.tensors)
            torch.testing.assert_close(mine.mask, expected.mask)


class Answer(OrderedDict[str, Any]):
    """Entries that are attributes as well."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{name: value for name, value in fields.items() if value is not None})
        self.__dict__.update(fields)


class Pair(Masked):
    """No dictionary."""


@dataclass
class Staged:
    """Tensors and a word."""

    tensors: Tensor
    weights: Tensor | None
    stage: str


class Outcome(Staged):
    """What comes of it."""


@pytest.fixture
def registered() -> Iterator[None]:
    """Registered by their owners, without the keys of their children."""
    register: Any = pytree.register_pytree_node
    register(
        Answer,
        lambda answer: ([*answer.values()], [*answer]),
        lambda values, names: Answer(**dict(zip(names, values, strict=True))),
    )
    register(Pair, lambda pair: ([pair.tensors, pair.mask], None), lambda values, _: Pair(*values))
    for kind in (Staged, Outcome):
        register(
            kind,
            lambda one: ([one.tensors, one.weights], one.stage),
            lambda values, stage, kind=kind: kind(*values, stage),
        )
    yield
    for kind in (Answer, Pair, Staged, Outcome):
        del pytree.SUPPORTED_NODES[kind], pytree.SUPPORTED_SERIALIZED_TYPES[kind]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("returned", [Answer, Pair])
@pytest.mark.parametrize("given", [Answer, Pair])
def test_classes_that_are_registered_without_keys_are_taken_and_returned(
    given: Any, returned: Any, engine: Any
) -> None:
    class Answering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given: Any) -> Any:
            return [returned(tensors=self.layer(given.tensors), mask=given.tensors * 2)]

    model = ORTModule(Answering(), options=Options(engine=engine, fallback="raise"))
    for rows in (2, 3):
        example = given(tensors=torch.randn(rows, 4), mask=torch.ones(rows, 4))
        (mine,), (expected,) = model(example), model.module(example)
        assert type(mine) is returned
        assert pytree.tree_structure(mine) == pytree.tree_structure(expected)
        torch.testing.assert_close(mine.tensors, expected.tensors)
        torch.testing.assert_close(mine.mask, expected.mask)
        mine.tensors.sum().backward()
    assert (model.report.captures, model.report.graph_calls) == (1, 2)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("arranged", ["alone", *ARRANGED])
def test_pytrees_that_are_registered_without_keys_are_arguments_and_results(arranged: str) -> None:
    """And what is no leaf of theirs is the call's form: another word is another graph."""
    put, take = ARRANGED.get(arranged, (lambda a, b: a, lambda a: (a, a)))

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given: Any) -> Any:
            one, two = take(given)
            found = self.layer(one.tensors) * (2 if one.stage == "train" else 3)
            found = found if two.weights is None else found * two.weights
            return put(Outcome(found, two.weights, one.stage), Outcome(found + 1, None, two.stage))

    torch.manual_seed(0)
    model: Any = ORTModule(Scaling(), options=Options(engine="aten", fallback="raise"))
    for stage in ("train", "evaluate", "train"):
        for weights in (None, torch.rand(2, 4)):
            given = put(*(Staged(torch.randn(2, 4), weights, stage) for _ in range(2)))
            for mine, its in zip(take(model(given)), take(model.module(given)), strict=True):
                assert (type(mine), mine.stage) == (Outcome, stage)
                torch.testing.assert_close(mine.tensors, its.tensors)
                torch.testing.assert_close(mine.weights, its.weights)
    assert (model.report.captures, model.report.eager_calls) == (4, 0)
