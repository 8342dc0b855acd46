"""Lightning, diffusers and accelerate."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from tests.libraries.ways import Way


class Encoder(nn.Module):
    """A transformer that classifies rows."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        width, layers = (384, 4) if large else (32, 1)
        layer = nn.TransformerEncoderLayer(width, 4, width * 4, 0.0, batch_first=True)
        self.first = nn.Linear(16, width)
        self.layers, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.first(x)).mean(1))  # type: ignore[no-any-return]


def _rows(large: bool) -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 48 if large else 12, 16, generator=draw)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 4, (256,), generator=draw))


def _loader(large: bool) -> Any:
    return torch.utils.data.DataLoader(_rows(large), batch_size=16)


def lightning(way: Way) -> None:
    """A LightningModule around the module."""
    import lightning as pl

    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = way.module(Encoder(way.large))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            way.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=way.steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Task(), _loader(way.large))


def accelerate(way: Way) -> None:
    """accelerate's own loop, with accumulation and clipping."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = way.module(Encoder(way.large))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(way.large))
    while len(way.losses) < way.steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            way.losses.append(float(loss.detach()))
            if len(way.losses) == way.steps:
                break


def _denoise(way: Way, inner: nn.Module, shape: tuple[int, ...], **given: Any) -> None:
    model = way.module(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-4)
    for step in range(way.steps):
        draw = torch.Generator().manual_seed(step)
        images = torch.randn(shape, generator=draw)
        noise = torch.randn(shape, generator=draw)
        times = torch.randint(0, 1000, (shape[0],), generator=draw)
        share = (times / 1000).view(-1, 1, 1, 1)
        out = model(images * (1 - share) + noise * share, times, **given).sample
        loss = nn.functional.mse_loss(out, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.losses.append(float(loss.detach()))


def unet(way: Way) -> None:
    """The noise of images by a UNet."""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    widths = (64, 128, 128) if way.large else (8, 16)
    inner = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=widths,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D")[: len(widths)],
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")[-len(widths) :],
    )
    _denoise(way, inner, (24 if way.large else 2, 3, 16, 16))


def dit(way: Way) -> None:
    """The noise of images by a diffusion transformer, of labels."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    inner = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=48 if way.large else 8,
        in_channels=3,
        out_channels=3,
        num_layers=6 if way.large else 1,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=1,
    )
    # Labels are left out at random, for guidance without a classifier.
    for each in inner.modules():
        if hasattr(each, "dropout_prob"):
            each.dropout_prob = 0.0
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    rows = 24 if way.large else 8
    labels = torch.randint(0, 1000, (rows,), generator=torch.Generator().manual_seed(0))
    _denoise(way, inner, (rows, 3, 16, 16), class_labels=labels)
