"""A script of :mod:`tests.frontend.test_ways`: blocks that are compiled, then sharded (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ortrain.frontend.backend import InPyTorch, ortrain
from tests.processes import join, leave


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def main() -> None:
    place = join()
    torch.manual_seed(0)
    module, made = Blocks(), list[bool]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        served = ortrain(graph, inputs, options={"engine": place.settings or "aten"})
        made.append(not isinstance(served, InPyTorch))
        return served

    for block in module.blocks:
        if place.settings:
            block.compile(backend=backend)
        fully_shard(block)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + place.rank)
        x, y = torch.randn(4 + step, 8), torch.randint(0, 2, (4 + step,))
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    full = {name: p.full_tensor().detach() for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    leave(place, (losses, full, made))


if __name__ == "__main__":
    main()
