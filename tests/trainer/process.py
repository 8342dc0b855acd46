"""One of several processes of a training: ``process.py RANK WORLD FOLDER SETTINGS``.

They find each other through a file in the folder. SETTINGS is JSON: ``trainer`` ("plain" or "ort"),
``model``, and training arguments. Rank 0 saves losses, weights and the report's figures.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = json.loads(sys.argv[4])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    # The library asks for an address although the group is there already.
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

    import torch
    from transformers import Trainer, TrainingArguments

    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
        )
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    from ortrain import ORTTrainer, ORTTrainingArguments
    from tests.trainer import models

    ours = settings.pop("trainer") == "ort"
    kind, args_kind = (ORTTrainer, ORTTrainingArguments) if ours else (Trainer, TrainingArguments)
    make, rows = getattr(models, settings.pop("model")), models.texts(kind=settings.pop("kind"))
    if world > 1:
        settings["ddp_backend"] = "gloo"
    run = models.train(kind, models.arguments(folder, args_kind, **settings), make(), rows)
    if rank == 0:
        report = run.trainer.ort_report if ours else None
        figures = {
            "losses": run.losses,
            "wrapped": type(run.trainer.model_wrapped).__name__,
            "calls": [report.graph_calls, report.fallback_calls] if report else None,
        }
        torch.save({"figures": figures, "weights": run.weights}, folder / "result.pt")
    if world > 1:
        torch.distributed.barrier()
        # Without the clean-up of the interpreter: gloo's threads and the file's lock may wait for
        # the other process there.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
