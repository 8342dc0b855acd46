"""One of several processes of trainings with Lightning; see `tests.processes`.

The settings are a list of trainings, run one after another:

- ``name``: of the checkpoint that it leaves;
- ``ours``: whether the model is in an ORTModule;
- ``epochs`` and ``precision``: Lightning's;
- ``resume``: the name of the training whose checkpoint it goes on from, or None.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ortrain import Options, ORTModule, OrtrainWarning
from tests.processes import Place, join, leave


class Classifier(lightning.LightningModule):
    """Notes its losses, and what was around it."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.model = ORTModule(model, options=Options(engine="onnxruntime")) if ours else model
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.around = ""

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.around = type(self.trainer.strategy.model).__name__
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss(batch)
        self.validated.append(loss.item())
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(seed: int, rows: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=generator)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=8)


def fit(place: Place, settings: dict[str, Any]) -> dict[str, Any]:
    """Figures and weights of one training."""
    model = Classifier(settings["ours"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=place.world,
        strategy=DDPStrategy(process_group_backend="gloo") if place.world > 1 else "auto",
        max_epochs=settings["epochs"],
        precision=settings["precision"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place.folder,
    )
    resume = settings["resume"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OrtrainWarning)
        trainer.fit(
            model,
            loader(1, 48),
            loader(2, 16),
            ckpt_path=place.folder / f"{resume}.ckpt" if resume else None,
            weights_only=False,
        )
        trainer.save_checkpoint(place.folder / f"{settings['name']}.ckpt")
    reports = [] if (report := getattr(model.model, "report", None)) is None else [report]
    reports += [report.inference] if reports and report.inference else []
    return {
        "losses": model.losses,
        "validated": model.validated,
        "around": model.around,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "calls": [sum(r.graph_calls for r in reports), sum(r.eager_calls for r in reports)],
        "warned": [str(w.message) for w in caught if issubclass(w.category, OrtrainWarning)],
    }


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    place = join()
    leave(place, [fit(place, settings) for settings in place.settings])


if __name__ == "__main__":
    main()
