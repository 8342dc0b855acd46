"""The peak of memory of a model, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ortrain.deploy.equivalence import peak
from ortrain.deploy.equivalence.sessions import Runnable

Batch = Mapping[str, np.ndarray]

# More is no measurement any more: a model that does not fit makes the machine swap.
_SECONDS = 300


def peak_memory(
    model: Runnable, batch: Batch, provider: str, threads: int | None
) -> tuple[int | None, str]:
    """Bytes at the peak of loading a model and running it, above those of onnxruntime by itself.

    Args:
        model: whose files are loaded anew.
        batch: to run, the largest one.
        provider: execution provider of onnxruntime.
        threads: of a session; None: as many as onnxruntime takes.

    Returns:
        The bytes and nothing, or None and why they could not be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = []
        for number, answer in enumerate(model.answer(batch, "the largest batch")):
            if answer.step:
                continue  # one more token takes no more than all of them
            path = Path(folder, f"{number}.npz")
            arrays = {f"input:{name}": array for name, array in answer.feeds.items()}
            np.savez(path, allow_pickle=False, **arrays)
            model_path = os.fspath(answer.file.path.absolute())
            asked.append({"model": model_path, "feeds": os.fspath(path)})
        text = json.dumps({"files": asked, "provider": provider, "threads": threads})
        # -P: nothing beside the script is taken for a module that another one imports.
        command = [sys.executable, "-P", os.fspath(Path(peak.__file__))]
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"the peak of memory was not measured: {error}"
    try:
        return int(json.loads(done.stdout)["bytes"]), ""
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return None, f"the peak of memory was not measured: {said[-1]}"
