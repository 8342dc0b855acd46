"""Options that ``generate_artifacts`` never looked at are told, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ortrain.compat.artifacts import generate_artifacts
from ortrain.errors import OrtrainWarning
from ortrain.ondevice import CheckpointState, LossType


def test_an_option_that_there_never_was_is_told_with_those_near_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(OrtrainWarning) as told:
        generate_artifacts(
            nn.Linear(3, 2),
            loss=LossType.MSELoss,
            example_inputs=[torch.zeros(2, 3)],
            artifacts_dir="elsewhere",
            training=1,
        )
    assert [str(w.message) for w in told] == [
        (
            "generate_artifacts: there is no option 'artifacts_dir', and there was none; near it "
            "is 'artifact_directory'"
        ),
        "generate_artifacts: there is no option 'training', and there was none",
    ]
    assert told[0].filename == __file__
    assert CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters["weight"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_wrong_value_of_an_option_is_the_error_that_it_is(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="prefix"):
        generate_artifacts(
            nn.Linear(3, 2),
            loss=LossType.MSELoss,
            example_inputs=[torch.zeros(2, 3)],
            artifact_directory=tmp_path,
            prefix=3,
        )
