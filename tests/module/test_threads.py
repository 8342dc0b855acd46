"""First calls from several threads: one capture, and everybody's own numbers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ortrain import ORTModule
from tests.module.agreement import GRAPH


def at_once(count: int, work: Callable[[int], None]) -> None:
    """Runs work in several threads that start together; raises the first of their errors."""
    barrier, errors = threading.Barrier(count), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_threads_that_call_one_module_first_have_its_results() -> None:
    eager = module()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    values = [torch.randn(3, 4) for _ in range(4)]
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = model(values[i])

    at_once(4, work)
    assert model.report.graph_calls == 20
    for i, value in enumerate(values):
        torch.testing.assert_close(results[i], eager(value))


def test_threads_with_modules_of_their_own_capture_them_one_after_another() -> None:
    eager = [module() for _ in range(4)]
    models = [ORTModule(copy.deepcopy(each), options=GRAPH) for each in eager]
    value = torch.randn(3, 4)

    def work(i: int) -> None:
        for _ in range(3):
            models[i](value).sum().backward()

    at_once(4, work)
    for plain, model in zip(eager, models, strict=True):
        assert model.report.mode == "graph"
        for _ in range(3):
            plain(value).sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_a_capture_leaves_custom_functions_of_other_threads_alone() -> None:
    model = ORTModule(module(), options=GRAPH)
    done = threading.Event()

    def work(number: int) -> None:
        if number:
            while not done.is_set():
                value = torch.ones(2, requires_grad=True)
                Doubled.apply(value).sum().backward()
                torch.utils.checkpoint.checkpoint(torch.sin, value, use_reentrant=True)
        else:
            try:
                model(torch.randn(3, 4))
            finally:
                done.set()

    at_once(2, work)
    assert model.report.mode == "graph"
