"""A directory that is either complete or not there, and the checkpoint of a run under way.

While a run is under way it writes to ``NAME.unfinished`` beside the directory ``NAME`` that it was
asked for, and gives it its name at the very end. An interrupted run leaves the unfinished
directory behind, with the last checkpoint in it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ortrain.cli.usage import UsageError, one_line


class Output:
    """The output directory of one run.

    Args:
        directory: The directory to make.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.unfinished = directory.with_name(directory.name + ".unfinished")
        self.checkpoint = self.unfinished / "checkpoint" / "state.pt"

    def check(self, *, resume: bool) -> None:
        """Raise a UsageError if the directory cannot be made, or there is nothing to resume."""
        if self.directory.exists() and not _is_empty_directory(self.directory):
            raise UsageError(
                f"{self.directory}: exists already; remove it, or choose another --output"
            )
        if resume and not self.checkpoint.exists():
            raise UsageError(
                f"{self.unfinished}: holds no checkpoint to resume; run again without --resume"
            )
        if not resume and self.checkpoint.exists():
            raise UsageError(
                f"{self.unfinished}: holds the checkpoint of an interrupted run; add --resume to "
                "continue it, or remove the directory"
            )
        if not resume and self.unfinished.exists():
            raise UsageError(
                f"{self.unfinished}: another run is writing it, or one was killed early; remove "
                "the directory, or choose another --output"
            )

    def open(self) -> None:
        """Make the unfinished directory.

        Raises:
            UsageError: It cannot be made.
        """
        try:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self.unfinished}: cannot be made ({error.strerror}); choose another --output"
            ) from None

    def abandon(self) -> None:
        """Remove the unfinished directory unless there is a checkpoint in it to go on from."""
        if not self.checkpoint.exists():
            shutil.rmtree(self.unfinished, ignore_errors=True)

    def discard(self) -> None:
        """Remove the unfinished directory, whatever is in it."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def finish(self) -> None:
        """Drop the checkpoint and give the directory its name."""
        shutil.rmtree(self.checkpoint.parent)
        if self.directory.exists():
            # An empty directory was welcome, and not every system renames over one.
            self.directory.rmdir()
        self.unfinished.rename(self.directory)

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; whatever happens meanwhile, the old or the new one is there."""
        beside = self.checkpoint.with_suffix(".new")
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.checkpoint)

    def read_checkpoint(self) -> dict[str, Any]:
        """The last checkpoint.

        Raises:
            UsageError: It cannot be read.
        """
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        except Exception as error:
            # What a damaged file raises depends on where it is damaged.
            raise UsageError(
                f"{self.checkpoint}: cannot be read ({one_line(error)}); remove "
                f"{self.unfinished} and run again without --resume"
            ) from error
        return state


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
