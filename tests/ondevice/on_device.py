"""Run in a process of its own: trains, saves, resumes and exports without the heavy packages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

BLOCKED = {"torch", "onnx", "onnx_ir", "onnxscript", "ml_dtypes", "transformers"}


class Blocked:
    """Refuses imports, as where these packages are not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def main(artifacts: Path, folder: Path) -> None:
    sys.meta_path.insert(0, Blocked())
    import ortrain
    import ortrain.ondevice

    assert ortrain.ondevice.__file__ is not None
    assert not {"numpy", "onnxruntime", "safetensors"} & {*sys.modules}

    import numpy as np

    from ortrain.ondevice import CheckpointState, LinearLRScheduler, Module, Optimizer, TrainStep

    def start(checkpoint: Path) -> tuple[CheckpointState, Module, Optimizer]:
        state = CheckpointState.load_checkpoint(checkpoint)
        module = Module(artifacts / "training_model.onnx", state, artifacts / "eval_model.onnx")
        return state, module, Optimizer(artifacts / "optimizer_model.onnx", module)

    batches = [(b["x"], b["labels"]) for b in (np.load(f) for f in sorted(folder.glob("*.npz")))]
    state, module, optimizer = start(artifacts / "checkpoint")
    scheduler = LinearLRScheduler(optimizer, 1, 8, 0.05)
    for x, labels in batches[:2]:
        module(x, labels)
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    state.properties["batches"] = 2
    CheckpointState.save_checkpoint(state, folder / "half", include_optimizer_state=True)
    state, module, optimizer = start(folder / "half")
    scheduler = LinearLRScheduler(optimizer, 1, 8, 0.05)
    for x, labels in batches[2:]:
        module(x, labels)
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    TrainStep(artifacts / "train_step_model.onnx", state)(*batches[0])
    CheckpointState.save_checkpoint(state, folder / "whole", include_optimizer_state=True)
    module.export_model_for_inferencing(folder / "inference.onnx", ["logits"])
    assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
