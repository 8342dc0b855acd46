"""One of several processes that train with `ortrain.classic`; see `tests.processes`.

The settings are a list of trainings: ``name`` of the optimizer, ``generation``, ``accumulation``,
``zero``, the stage of ZeRO, ``uneven``, whether a layer is reached in one process only,
``steps``, 40 where it is not said, and ``folder``, where a checkpoint is left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.classic import models
from tests.processes import Place, join, leave

STEPS = 40


class Branching(nn.Module):
    """A layer that only some batches reach, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some, self.none = (nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(x) + (self.some(x) if x.shape[0] > 4 else 0)


def own_share(place: Place, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this process."""
    return x.chunk(place.world)[place.rank], y.chunk(place.world)[place.rank]


def trained(place: Place, settings: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights of one training."""
    name, zero = settings["name"], settings.get("zero", 0)
    accumulation = settings.get("accumulation", 1)
    model = models.classifier(Branching if settings.get("uneven") else models.Classifier)
    trainer: Any
    if settings["generation"] == 1:
        trainer = models.of_first(
            model,
            name,
            lambda weight: {"lambda": 0.01 if models.decays(weight) else 0.0},
            world_rank=place.rank,
            world_size=place.world,
            gradient_accumulation_steps=accumulation,
            deepspeed_zero_stage=zero,
        )
    else:
        trainer = models.second(
            model,
            models.config_of(name, model),
            batch={"gradient_accumulation_steps": accumulation},
            distributed={
                "world_rank": place.rank,
                "world_size": place.world,
                "deepspeed_zero_optimization": {"stage": zero},
            },
            **({"ortrain": None} if settings.get("uneven") else {}),
        )
    losses = []
    for x, y in models.batches(settings.get("steps", STEPS)):
        share = own_share(place, x, y)
        if settings.get("uneven") and place.rank == 1:
            share = share[0][:2], share[1][:2]
        elif settings.get("uneven"):
            share = x[:6], y[:6]
        rate = () if settings["generation"] == 2 else (torch.tensor([models.RATE]),)
        losses.append(trainer.train_step(*share, *rate)[0].item())
    result = {
        "losses": losses,
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "state": trainer.state_dict(),
    }
    if settings.get("folder"):
        from ortrain.classic import checkpoint, first

        folder = place.folder / settings["folder"]
        folder.mkdir(exist_ok=True)
        save = first.save_checkpoint if settings["generation"] == 1 else None
        (save or checkpoint.experimental_save_checkpoint)(trainer, folder)
    gathered: list[Any] = [None] * place.world
    torch.distributed.all_gather_object(gathered, result)
    return {"ranks": gathered}


if __name__ == "__main__":
    place = join()
    leave(place, [trained(place, settings) for settings in place.settings])
