"""The four steps of 2020, in one of several processes that mpirun would have started."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

from ortrain.classic import supplement as ort_supplement
from tests.classic import models
from tests.processes import Place, leave

STEPS, ROWS, LENGTH = 6, 4, 12


class Bert(nn.Module):
    """BERT with the loss of its pre-training."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertForPreTraining(
            BertConfig(
                vocab_size=60,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor,
        input_mask: Tensor,
        masked_lm_labels: Tensor,
        next_sentence_labels: Tensor,
    ) -> Tensor:
        return self.bert(
            input_ids=input_ids,
            token_type_ids=segment_ids,
            attention_mask=input_mask,
            labels=masked_lm_labels,
            next_sentence_label=next_sentence_labels,
        ).loss


def bert() -> Bert:
    torch.manual_seed(0)
    return Bert()


def batches(rows: int) -> list[tuple[Tensor, ...]]:
    """Batches for all processes."""
    generator = torch.Generator().manual_seed(1)

    def draw(high: int, *size: int) -> Tensor:
        return torch.randint(0, high, size, generator=generator)

    found = []
    for _ in range(STEPS):
        ids, segments = draw(60, rows, LENGTH), draw(2, rows, LENGTH)
        mask = torch.ones(rows, LENGTH, dtype=torch.int64)
        # As many words are masked in each row, so that the mean of two halves is that of all.
        labels = torch.where(torch.arange(LENGTH) < 4, ids, -100)
        found.append((ids, segments, mask, labels, draw(2, rows)))
    return found


def arguments(**more: Any) -> Namespace:
    return Namespace(
        seed=42,
        train_batch_size=ROWS,
        max_seq_length=LENGTH,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        max_steps=STEPS // 2,
        warmup_proportion=0.1,
        schedule="warmup_poly",
        allreduce_post_accumulation=True,
        fp16=False,
        vocab_size=60,
        ortrain=models.GRAPH,
        **more,
    )


def trained(folder: Path) -> dict[str, Any]:
    """What the steps give, typed as the article has them."""
    args = arguments(init_method=f"file://{folder}/rendezvous")
    model: Any = bert()

    # Step 1: set up the distributed environment.
    device = ort_supplement.setup_onnxruntime_with_mpi(args)
    # Step 2: create the trainer.
    model = ort_supplement.create_ort_trainer(args, device, model)
    # Step 3: run training steps.
    global_step = 0
    losses = []
    for training_steps, whole in enumerate(batches(ROWS * args.world_size), 1):
        batch = tuple(t.chunk(args.world_size)[args.world_rank] for t in whole)
        loss, global_step = ort_supplement.run_ort_training_step(
            args, global_step, training_steps, model, batch
        )
        losses.append(loss.item())
    # Step 4: export the trained model.
    out_path = str(folder / f"bert-{args.world_rank}.onnx")
    model.save_as_onnx(out_path)

    weights = model.state_dict(include_optimizer_state=False)
    return {
        "args": {k: v for k, v in vars(args).items() if isinstance(v, int)},
        "global_step": global_step,
        "losses": losses,
        "weights": weights,
        "evaluated": model.eval_step(*batch).item(),
        "batch": batch,
    }


if __name__ == "__main__":
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    for name, value in zip(names, (rank, world, rank, world), strict=True):
        os.environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
    result = trained(folder)
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, result)
    leave(Place(rank, world, folder, None), gathered)
