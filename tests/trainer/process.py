"""One of several processes of trainings; see `tests.processes`.

The settings are a list of trainings, run one after another: training arguments, and

- ``trainer``: "plain" or "ort";
- ``model`` and ``kind``: functions and data of `tests.trainer.models`;
- ``name``: of its output folder;
- ``resume``: a checkpoint, as a path in the folder of all;
- ``replaces``: whether `FP16_Optimizer` is called on its optimizer;
- ``fails``: whether it ends with an error.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests import on_deepspeed
from tests.processes import Place, join, leave


class Replaces(TrainerCallback):
    """Calls `FP16_Optimizer` on the optimizer."""

    def on_train_begin(self, *_: Any, optimizer: Any = None, **more: Any) -> None:
        from ortrain.optim import FP16_Optimizer

        FP16_Optimizer(optimizer)


def trained(place: Place, settings: dict[str, Any]) -> dict[str, Any]:
    """Figures and weights of one training."""
    from ortrain import ORTTrainer, ORTTrainingArguments
    from tests.trainer import models

    ours = settings.pop("trainer") == "ort"
    kind, args_kind = (ORTTrainer, ORTTrainingArguments) if ours else (Trainer, TrainingArguments)
    make, rows = getattr(models, settings.pop("model")), models.texts(kind=settings.pop("kind"))
    output = place.folder / settings.pop("name", "output")
    resume = settings.pop("resume", None)
    callbacks = [Replaces()] if settings.pop("replaces", False) else []
    if place.world > 1:
        settings["ddp_backend"] = "gloo"
    args = models.arguments(output, args_kind, **settings)
    run = models.train(
        kind,
        args,
        make(),
        rows,
        resume=str(place.folder / resume) if resume else None,
        callbacks=callbacks,
    )
    trainer, weights = run.trainer, run.weights
    if trainer.is_deepspeed_enabled:  # the only way to those that ZeRO 3 has partitioned
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    inner = getattr(trainer.optimizer, "optimizer", None)
    report = trainer.ort_report if ours else None
    return {
        "losses": run.losses,
        "norms": run.norms,
        "eval_loss": run.metrics["eval_loss"],
        "wrapped": type(trainer.model_wrapped).__name__,
        "optimizer": type(inner).__name__,
        "replaced": "get_grad_norm_direct" in vars(inner) if inner is not None else False,
        "calls": [report.graph_calls, report.fallback_calls] if report else None,
        "weights": {name: value.float().clone() for name, value in weights.items()},
        "files": sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file()),
    }


def train(place: Place, settings: dict[str, Any]) -> dict[str, Any]:
    """One training with what it warned of, or its error."""
    from ortrain import OrtrainWarning

    fails = settings.pop("fails", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = trained(place, settings)
        except Exception as error:
            if not fails:
                raise
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return {"error": str(error), "kinds": kinds}
    assert not fails, "the training did not fail"
    warned = [str(each.message) for each in caught if issubclass(each.category, OrtrainWarning)]
    return {**result, "warned": warned}


def main() -> None:
    uses_deepspeed = "deepspeed" in sys.argv[4]
    if uses_deepspeed:
        on_deepspeed.prepare()
    place = join(alone=uses_deepspeed)
    leave(place, [train(place, dict(settings)) for settings in place.settings])


if __name__ == "__main__":
    main()
