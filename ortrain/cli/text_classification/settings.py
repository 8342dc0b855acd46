"""What a run was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Engine = Literal["ortrain", "torch"]
Precision = Literal["fp32", "bf16"]
SkipPadding = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run.

    Attributes:
        model: A directory of a pretrained model, or its name on the hub.
        training_file: CSV, TSV or JSON-lines with one example a row.
        evaluation_file: The same, never trained on.
        output: The directory that the run makes.
        engine: ``"ortrain"`` trains through ONNX, ``"torch"`` runs the plain model.
        skip_padding: Whether work on padding is left out: ``"auto"`` where that shows in no output,
            ``"off"`` never. A classifier shows none, so that ``"on"`` is the same as ``"auto"``.
        epochs: Passes over the training file.
        batch_size: Examples in a batch.
        learning_rate: At the first step; falls in a line to zero.
        weight_decay: AdamW's, per unit of learning rate.
        max_length: Tokens of an example that are read; the rest is cut off.
        seed: Decides the new weights, the order and the dropout.
        dropout: Replaces every dropout probability of the model if given.
        text_column: Name of the column with the text.
        label_column: Name of the column with the label.
        columns: Names of all columns, for files without a header line.
        checkpoint_every: Steps between two checkpoints.
        resume: Continue from the checkpoint of an interrupted run.
        onnx: Write the trained model as ONNX as well.
        trust_remote_code: Run the Python files that come with the model.
    """

    model: str
    training_file: Path
    evaluation_file: Path
    output: Path
    engine: Engine = "ortrain"
    skip_padding: SkipPadding = "auto"
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    max_length: int = 128
    seed: int = 0
    dropout: float | None = None
    text_column: str = "text"
    label_column: str = "label"
    columns: tuple[str, ...] | None = None
    checkpoint_every: int = 100
    resume: bool = False
    onnx: bool = True
    trust_remote_code: bool = False
