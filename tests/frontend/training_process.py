"""A script of :mod:`tests.frontend.test_processes`: trainings of two processes, and their faults.

The settings are a list of trainings, run one after another, each plainly and through ortrain:

- ``way``: how the model is wrapped, of ``WAYS``;
- ``fault``: what is otherwise in the last process, of ``FAULTS``; empty for nothing;
- ``of``: keyword arguments of `DistributedDataParallel` or of `fully_shard`, of ``SETTINGS``;
- ``engine``: ortrain's;
- ``checkpoints``: whether blocks are called through `checkpoint`;
- ``exchanges``: whether the model's forward itself exchanges something between blocks;
- ``zero``: whether the optimizer is a `ZeroRedundancyOptimizer`;
- ``no_sync``: whether some backwards exchange nothing;
- ``steps``: how many.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ortrain
from ortrain import Options, ORTModule
from ortrain.errors import ExecutionError
from ortrain.frontend import backend
from ortrain.frontend.in_place import report_of
from ortrain.step.autograd import Step
from tests.processes import join, leave


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        result: Tensor = x + self.down(nn.functional.gelu(h))
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.unused = nn.Linear(8, 2), nn.Linear(2, 2)
        self.checkpoints = self.exchanges = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if self.exchanges:
                x = x - functional.all_reduce(x.mean(0, keepdim=True)) / 2
        result: Tensor = self.head(x)
        return result


class Held:
    """Holds modules by ortrain, or leaves them."""

    def __init__(self, engine: str) -> None:
        self.engine: Any = engine
        self.reports: list[Callable[[], Any]] = []

    def wrapped(self, module: nn.Module) -> nn.Module:
        if not self.engine:
            return module
        model = ORTModule(module, options=Options(engine=self.engine))
        self.reports.append(lambda: model.report)
        return model

    def compiled(self, module: nn.Module) -> nn.Module:
        if self.engine:
            ortrain.compile(module, engine=self.engine)
            self.reports.append(lambda: report_of(module))
        return module


def ddp_outside(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return DistributedDataParallel(held.wrapped(model), **of)


def ddp_around_compiled(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return DistributedDataParallel(held.compiled(model), **of)


def compiled_in_ddp(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    outer = DistributedDataParallel(model, **of)
    held.compiled(outer.module)
    return outer


def ddp_inside(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return held.wrapped(DistributedDataParallel(model, **of))


def ddp_compiled(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return held.compiled(DistributedDataParallel(model, **of))


def blocks_then_sharded(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    for block in model.blocks:
        fully_shard(held.compiled(block), **of)
    return fully_shard(model, **of)


def sharded_then_blocks(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **of)
    fully_shard(model, **of)
    for block in model.blocks:
        held.compiled(block)
    return model


def wrapped_blocks_then_sharded(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    model.blocks = nn.ModuleList(held.wrapped(block) for block in model.blocks)
    for block in model.blocks:
        fully_shard(block, **of)
    return fully_shard(model, **of)


def sharded_all(model: Blocks, of: dict[str, Any]) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **of)
    return fully_shard(model, **of)


def sharded_then_whole(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return held.compiled(sharded_all(model, of))


def sharded_then_wrapped(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return held.wrapped(sharded_all(model, of))


def whole_then_sharded(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    held.compiled(model)
    return sharded_all(model, of)


def wrapped_then_sharded(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    outer = held.wrapped(model)
    for block in model.blocks:
        fully_shard(block, **of)
    return fully_shard(outer, **of)


def wrapped_then_root_sharded(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return fully_shard(held.wrapped(model), **of)


def root_sharded_then_wrapped(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return held.wrapped(fully_shard(model, **of))


def alone(model: Blocks, held: Held, of: dict[str, Any]) -> nn.Module:
    return held.wrapped(model)


OF_DDP = (ddp_outside, ddp_around_compiled, compiled_in_ddp, ddp_inside, ddp_compiled)
OF_FSDP = (
    blocks_then_sharded,
    sharded_then_blocks,
    wrapped_blocks_then_sharded,
    sharded_then_whole,
    sharded_then_wrapped,
    whole_then_sharded,
    wrapped_then_sharded,
    wrapped_then_root_sharded,
    root_sharded_then_wrapped,
)
WAYS = {way.__name__: way for way in (*OF_DDP, *OF_FSDP, alone)}

SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "no reshard": {"reshard_after_forward": False},
}


# -- what is otherwise in one process ------------------------------------------------------------


@contextlib.contextmanager
def _conversions_fail(numbers: set[int]) -> Iterator[None]:
    """Some of Dynamo's graphs, in their order, are errors."""
    from ortrain.frontend.compiled import Compiled

    take, count = Compiled.take, itertools.count()

    def taken(self: Compiled, *args: Any) -> Any:
        if next(count) in numbers:
            raise RuntimeError("an injected fault of the conversion")
        return take(self, *args)

    with mock.patch.object(Compiled, "take", taken):
        yield


@contextlib.contextmanager
def _graphs_fail() -> Iterator[None]:
    """No graph can be made."""

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an injected fault of a stage")

    with mock.patch("ortrain.frontend.graph.translated", failing):
        yield


@contextlib.contextmanager
def _steps_fail(every: int) -> Iterator[None]:
    train, count = Step.train, itertools.count()

    def failing(self: Step, *args: Any, **kwargs: Any) -> Any:
        if next(count) % every == 1:
            raise ExecutionError("an injected fault of a step")
        return train(self, *args, **kwargs)

    with mock.patch.object(Step, "train", failing):
        yield


@contextlib.contextmanager
def _backwards_fail() -> Iterator[None]:
    from ortrain.runtime.aten.executor import AtenCompiled

    run, count = AtenCompiled.run_values, itertools.count()

    def failing(self: AtenCompiled, feeds: Any) -> Any:
        if next(count) % 5 == 3:
            raise ExecutionError("an injected fault of a piece")
        return run(self, feeds)

    with mock.patch.object(AtenCompiled, "run_values", failing):
        yield


@contextlib.contextmanager
def _no_budget() -> Iterator[None]:
    """After some calls nothing may be converted, whatever the clock says."""
    count = itertools.count()
    may = property(lambda _: next(count) < 3)
    with mock.patch("ortrain.frontend.policy.Policy.may_convert", may):
        yield


@contextlib.contextmanager
def _slow_clock() -> Iterator[None]:
    """Each step of a graph seems to take far longer here."""
    seconds = itertools.accumulate(itertools.count(), lambda a, b: a + 10.0 * b)
    with (
        mock.patch("ortrain.step.marks.clock", seconds.__next__),
        mock.patch("ortrain.frontend.autotune.MARGIN", 0.0),
    ):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "first conversion": lambda: _conversions_fail({0}),
    "second conversion": lambda: _conversions_fail({1}),
    "third conversion": lambda: _conversions_fail({2}),
    "all conversions": lambda: _conversions_fail(set(range(1000))),
    "no graph": _graphs_fail,
    "steps": lambda: _steps_fail(2),
    "backwards": _backwards_fail,
    "budget": _no_budget,
    "clock": _slow_clock,
}
# Those of the data and the module's code, which are there plainly too.
OF_DATA = ("break", "rows", "nothing")


# -- a training ----------------------------------------------------------------------------------


def rows_of(step: int, rank: int, world: int, fault: str) -> int:
    """So many in a batch."""
    own = 4 + step % 3
    if rank != world - 1:
        return own
    return {"rows": 2 * own + 1, "nothing": 0 if step % 2 else own}.get(fault, own)


def trained(run: dict[str, Any], rank: int, world: int, engine: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, held = Blocks(), Held(engine)
    of, fault = SETTINGS[run["of"]], run["fault"]
    if run["of"] != "unused":
        del model.unused
    model.checkpoints, model.exchanges = run["checkpoints"], run["exchanges"]
    if fault == "break" and rank == world - 1:
        model.blocks[1].breaks = True
    way = WAYS[run["way"]]
    outer = way(model, held, of)
    optimizer: Any = torch.optim.AdamW(outer.parameters(), lr=0.01)
    if run["zero"]:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # whose import warns

        optimizer = ZeroRedundancyOptimizer(outer.parameters(), torch.optim.AdamW, lr=0.01)
    losses = []
    for step in range(run["steps"]):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(rows_of(step, rank, world, fault), 8)
        silent = step % 3 == 1 and run["no_sync"]
        with outer.no_sync() if silent else contextlib.nullcontext():
            loss = outer(x).float().square().sum() / 8
            loss.backward()
        losses.append(float(loss))
        if not silent:
            optimizer.step()
            optimizer.zero_grad()
    outer.eval()
    with torch.no_grad():
        losses.append(float(outer(torch.ones(3, 8)).float().sum()))
    found = [report() for report in held.reports]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in outer.parameters()]
    return {
        "losses": losses,
        "weights": [w.detach().float().clone() for w in weights],
        "graphs": sum(report.graph_calls for report in found),
        "calls": sum(report.graph_calls + report.eager_calls for report in found),
        "captures": max((report.captures for report in found), default=0),
        "reasons": sorted({report.reason for report in found}),
    }


def padded(rank: int, world: int) -> dict[str, Any]:
    """BERT on padded rows: losses, plainly and as graphs, and the share that these leave out."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    losses: dict[bool, list[float]] = {}
    for ours in (False, True):
        torch.manual_seed(0)
        inner: nn.Module = BertForSequenceClassification(config)
        model = ORTModule(inner, options=Options(engine="aten")) if ours else inner
        outer = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        losses[ours] = []
        for step in range(4):
            torch.manual_seed(10 * step)  # the same rows in each process
            mask = (torch.arange(48) < torch.randint(4, 48, (6, 1))).long()
            ids, labels = torch.randint(0, 50, (6, 48)) * mask, torch.randint(0, 2, (6,))
            torch.manual_seed(10 * step)
            loss = outer(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[ours].append(float(loss))
    assert isinstance(model, ORTModule)
    report = model.report
    return {
        "losses": losses[True], "plain": losses[False], "graphs": report.graph_calls,
        "left out": report.left_out, "share": report.left_out_share,
    }  # fmt: skip


def early(rank: int, world: int) -> list[str]:
    """What happens in a backward: pieces of the graph, and exchanges of the gradients so far."""
    from ortrain.runtime.aten.executor import AtenCompiled

    layers = [nn.Linear(1536, 1536, bias=False) for _ in range(8)]
    outer = DistributedDataParallel(ORTModule(nn.Sequential(*layers), options=OPTIONS))
    events: list[str] = []

    def exchange(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        events.append("exchange")
        return (
            distributed.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    outer.register_comm_hook(None, exchange)
    run = AtenCompiled.run_values

    def noted(self: AtenCompiled, feeds: Any) -> Any:
        events.append("piece")
        return run(self, feeds)

    for _ in range(3):
        loss = outer(torch.ones(2, 1536)).square().mean()
        events.clear()
        with mock.patch.object(AtenCompiled, "run_values", noted):
            loss.backward()
    return events


OPTIONS = Options(engine="aten", fallback="raise")
OTHERS: dict[str, Callable[[int, int], Any]] = {"padded": padded, "early": early}


def main() -> None:
    place = join(alone=True)
    warnings.simplefilter("ignore")
    # What a contest of many steps would do, in few.
    for name, value in {
        "ortrain.frontend.policy.Policy._pays": lambda *_: True,
        "ortrain.step.tokens.LEAST": 0,
        "ortrain.frontend.autotune.LEAST": 1,
        "ortrain.frontend.autotune.SECONDS": 0.0,
        "ortrain.frontend.autotune.ROUNDS": 1,
        "ortrain.frontend.autotune.Duel._look_early": lambda *_: None,
        "ortrain.frontend.autotune.MARGIN": math.inf,
    }.items():
        mock.patch(name, value).start()
    results = []
    for run in place.settings:
        print(run, flush=True)  # which one has not come to its end
        if run["way"] in OTHERS:
            results.append(OTHERS[run["way"]](place.rank, place.world))
            continue
        if run["fault"]:
            backend._KNOWN.clear()  # it would find graphs of earlier trainings
        plain = trained(run, place.rank, place.world, "")
        fault = FAULTS.get(run["fault"]) if place.rank == place.world - 1 else None
        with contextlib.nullcontext() if fault is None else fault():
            ours = trained(run, place.rank, place.world, run["engine"])
        everywhere: list[Any] = [None] * place.world
        distributed.all_gather_object(everywhere, (plain, ours))
        results.append(everywhere)
    leave(place, results)


if __name__ == "__main__":
    main()
