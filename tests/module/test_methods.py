"""Methods of the wrapped module that call it: they reach the graph, and lose nothing."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

SUBCLASSES: list[type] = []


class Base(nn.Module):
    """Hears of its subclasses, and has a slot and methods that others go on to."""

    __slots__ = ("seen",)
    scale: ClassVar[float] = 2.0

    def __init_subclass__(cls, **_: Any) -> None:
        SUBCLASSES.append(cls)

    def inherited(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result


class Net(Base):
    """Calls itself in every way that there is."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear, self.__factor, self.seen = nn.Linear(4, width), 0.5, 0
        self.held = self.by_call
        self.example = torch.ones(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(x)) * self.__factor
        return result

    def by_call(self, x: Tensor) -> Tensor:
        return self(x) * self.__factor

    def by_forward(self, x: Tensor) -> Tensor:
        return self.forward(x) * self.scale

    def by_keyword(self, x: Tensor) -> Tensor:
        result: Tensor = self(x=x)
        return result

    def inherited(self, x: Tensor) -> Tensor:
        assert isinstance(self, Net)
        return super().inherited(x) * 3

    def by_another(self, x: Tensor) -> Tensor:
        return self.by_call(x) + 1

    def by_held(self, x: Tensor) -> Tensor:
        return self.held(x) + 2

    def by_name(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self, "by_call")(x)  # noqa: B009
        return result

    def by_unbound(self, x: Tensor) -> Tensor:
        return Net.by_call(self, x)

    def by_closure(self, x: Tensor) -> Tensor:
        return (lambda given: self(given))(x)

    def by_partial(self, x: Tensor) -> Tensor:
        return functools.partial(self.by_call)(x)

    def by_thread(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self(x)))
        thread.start()
        thread.join()
        return found[0]

    def by_generator(self, x: Tensor) -> Tensor:
        def rows() -> Iterator[Tensor]:
            yield self(x)

        return torch.cat([*rows()])

    def by_coroutine(self, x: Tensor) -> Tensor:
        return asyncio.run(self.later(x))

    async def later(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result

    @property
    def of_example(self) -> Tensor:
        result: Tensor = self(self.example)
        return result

    def by_property(self, x: Tensor) -> Tensor:
        return self.of_example + self(x)

    @torch.no_grad()
    def without_gradients(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result

    # What has nothing to do with calls.

    @classmethod
    def wide(cls) -> Net:
        return cls(8)

    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def another(self) -> Net:
        return type(self)(5)

    def itself(self) -> Net:
        return self

    def count(self) -> int:
        self.seen += 1
        self.noted = self.seen
        return int(self.seen)

    def replaced(self, x: Tensor) -> Tensor:
        """Calls what it puts in front of its forward, as some libraries do for a while."""
        before = self.forward
        self.forward = lambda given: before(given) + 10  # type: ignore[method-assign]
        try:
            result: Tensor = self(x)
        finally:
            del self.forward
        return result

    def fails(self, x: Tensor) -> Tensor:
        self(x)
        raise KeyError("its own")


CALLING = [*sorted(name for name in vars(Net) if name.startswith("by_")), "inherited"]


def twins(options: Options | None = None) -> tuple[Net, ORTModule]:
    torch.manual_seed(0)
    plain = Net()
    return plain, ORTModule(copy.deepcopy(plain), options=options or Options(engine="aten"))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", CALLING)
def test_a_method_that_calls_the_module_reaches_the_graph(name: str, engine: Any) -> None:
    plain, model = twins(Options(engine=engine, fallback="raise"))
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        results = []
        for each in (plain, model):
            given = x.clone().requires_grad_()
            result = getattr(each, name)(given)
            each.zero_grad()
            result.square().sum().backward()
            results.append([result, given.grad, *(p.grad for p in each.parameters())])
        torch.testing.assert_close(results[1], results[0])
    assert model.report.graph_calls >= 3
    assert model.report.eager_calls == 0


def test_modes_of_the_method_are_those_of_the_graph() -> None:
    plain, model = twins()
    x = torch.randn(2, 4)
    result = model.without_gradients(x)
    assert not result.requires_grad
    torch.testing.assert_close(result, plain.without_gradients(x))
    assert model.report.mode == "graph"


def test_a_coroutine_function_stays_one() -> None:
    plain, model = twins()
    assert inspect.iscoroutinefunction(model.later)
    x = torch.randn(2, 4)
    torch.testing.assert_close(asyncio.run(model.later(x)), asyncio.run(plain.later(x)))
    assert model.report.graph_calls == 1


def test_hooks_of_ortmodule_hear_of_it_once() -> None:
    _, model = twins()
    heard: list[str] = []
    model.register_forward_hook(lambda *_: heard.append("forward"))
    model.by_another(torch.randn(2, 4))
    assert heard == ["forward"]
    assert model.report.mode == "graph"


@pytest.mark.filterwarnings("ignore:ORTModule runs")
@pytest.mark.parametrize("name", ["by_call", "by_forward"])
def test_hooks_of_the_module_hear_of_it_as_in_pytorch(name: str) -> None:
    heard: dict[str, int] = {}
    plain, model = twins()
    for key, each in (("plain", plain), ("model", model.module)):
        heard[key] = 0

        def hook(*_: Any, key: str = key) -> None:
            heard[key] += 1

        each.register_forward_hook(hook)
    x = torch.randn(2, 4)
    torch.testing.assert_close(getattr(model, name)(x), getattr(plain, name)(x))
    assert heard["plain"] == heard["model"] == int(name == "by_call")
    assert model.report.mode == "eager"
    assert "hook" in model.report.reason


def test_a_forward_that_is_replaced_meanwhile_is_the_one_that_runs() -> None:
    plain, model = twins()
    x = torch.randn(2, 4)
    for _ in range(2):
        torch.testing.assert_close(model.replaced(x), plain.replaced(x))
        torch.testing.assert_close(model(x), plain(x))


def test_a_forward_that_a_library_has_put_around_ortmodules_is_called() -> None:
    plain, model = twins()
    inner = model.forward
    model.forward = lambda x: inner(x) + 100
    x = torch.randn(2, 4)
    torch.testing.assert_close(model.by_call(x), (plain(x) + 100) * 0.5)


def test_what_the_method_does_to_itself_it_does_to_the_module() -> None:
    model = ORTModule(Net())
    known = len(SUBCLASSES)
    assert [model.count(), model.count()] == [1, 2]
    assert model.module.seen == model.module.noted == model.noted == 2
    assert len(SUBCLASSES) == known


def test_what_a_method_returns_is_ortmodule_and_new_modules_are_plain() -> None:
    _, model = twins()
    assert model.itself() is model
    assert type(model.wide()) is type(model.another()) is Net
    assert model.another().linear.out_features == 5
    torch.testing.assert_close(model.doubled(torch.ones(1)), torch.full((1,), 2.0))
    assert model.linear is model.module.linear
    assert model.example is model.module.example


def test_an_error_of_the_method_is_its_own() -> None:
    _, model = twins()
    with pytest.raises(KeyError, match="its own"):
        model.fails(torch.randn(2, 4))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        _ = model.absent
    assert model.report.graph_calls == 1


def test_a_method_is_compared_copied_and_pickled_as_bound_ones_are() -> None:
    plain, model = twins()
    x, method = torch.randn(2, 4), model.by_call
    assert method == model.by_call != model.by_forward
    assert {method: 1}[model.by_call] == 1
    assert inspect.signature(method) == inspect.signature(plain.by_call)
    assert method.__name__ == "by_call"
    for other in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        torch.testing.assert_close(other(x), plain.by_call(x))
        assert isinstance(other.__self__, Net)
    del model
    torch.testing.assert_close(method(x), plain.by_call(x))


class Keeping(nn.Module):
    """Keeps itself, a method and a copy in its attributes, as soon as it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result

    def keep(self) -> None:
        self.method, self.places = self.call, {self: 1}
        self.kind = type(copy.deepcopy(self))

    def call(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result


def test_a_module_may_keep_what_its_method_saw() -> None:
    model = ORTModule(Keeping(), options=Options(engine="aten"))
    x = torch.randn(2, 4)
    model.keep()
    assert model.places[model.module] == 1
    assert model.module.method.__self__ is model.module
    assert model.kind is Keeping
    again = copy.deepcopy(model)
    for each in (model, again, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each(x), model.linear(x))
        torch.testing.assert_close(each.method(x), model.linear(x))


def test_nothing_is_kept_alive_by_a_method() -> None:
    _, model = twins()
    model.by_call(torch.randn(2, 4))
    gone = weakref.ref(model.module)
    del model
    gc.collect()
    assert gone() is None


class Ending(Keeping):
    """Tells of its end."""

    ends: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.ends.append(1)


def test_a_module_ends_once() -> None:
    Ending.ends.clear()
    model = ORTModule(Ending(), options=Options(engine="aten"))
    model.call(torch.randn(2, 4))
    gc.collect()
    assert not Ending.ends
    del model
    gc.collect()
    assert Ending.ends == [1]


class Registry(type):
    """Keeps all classes that it makes."""

    kept: ClassVar[list[str]] = []

    def __new__(cls, name: str, *args: Any, **kwargs: Any) -> Any:
        cls.kept.append(name)
        return super().__new__(cls, name, *args, **kwargs)


class Registered(Keeping, metaclass=Registry):
    """Of a class that is in a registry."""


def test_a_registry_of_classes_hears_of_nothing() -> None:
    model = ORTModule(Registered(), options=Options(engine="aten"))
    known = [*Registry.kept]
    model.call(torch.randn(2, 4))
    assert Registry.kept == known
    assert model.report.mode == "graph"


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("how", ["compile", "trace"])
def test_a_method_is_traced_as_the_modules_own(how: str) -> None:
    plain, model = twins()
    x = torch.randn(2, 4)
    model.requires_grad_(False)
    if how == "compile":
        traced: Callable[..., Any] = torch.compile(model.by_call, backend="eager")
    else:
        traced = torch.jit.trace(lambda given: model.by_call(given), x)
    torch.testing.assert_close(traced(x), plain.by_call(x))
    torch._dynamo.reset()


def test_generate_runs_in_pytorch_and_says_why() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).eval()
    model = ORTModule(copy.deepcopy(plain), options=Options(engine="aten", fallback="raise"))
    ids = torch.randint(3, 50, (2, 4))
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **given).tolist() == plain.generate(ids, **given).tolist()
    assert "key-value cache" in model.report.reason
    assert model.generate(ids, use_cache=False, **given).shape == (2, 8)
    assert model.report.mode == "graph"
