"""A MiniLM classifier quantized in each way: size, kernels, answers, and speed against float32.

    python benchmarks/quantization.py [--rounds 60] [--threads 1] [--ways dynamic-auto …]

all-MiniLM-L6-v2 is trained on synthetic reviews first, exported once, and quantized in each way. On
held-out reviews, ``agreement`` is the share of predictions that stay, ``accuracy`` that of right
ones. Sessions take turns on one input of each size; ``kernels`` are the operators that multiply in
the graph that onnxruntime has made of the file.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from loss_curve import pretrained, synthetic
from measurement import Results, Row, alternate, arguments, compared, one_of, table
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ortrain.deploy import export_onnx
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    HalfPrecisionConfig,
    ORTQuantizer,
    WeightOnlyConfig,
)

SIZES = {"1 x 32": (1, 32), "8 x 64": (8, 64)}
_PRODUCTS = ("MatMul", "Gemm", "Conv", "Attention", "QLinear", "DequantizeLinear")
Feeds = dict[str, np.ndarray]


def _preset(name: str, **given: Any) -> Any:
    return getattr(AutoQuantizationConfig, name)(**given)


WAYS: dict[str, Any] = {
    "dynamic-auto": partial(_preset, "auto", is_static=False),
    "dynamic-avx2": partial(_preset, "avx2", is_static=False),
    "dynamic-avx512_vnni": partial(_preset, "avx512_vnni", is_static=False),
    "dynamic-s8-per-tensor": partial(_preset, "avx512_vnni", is_static=False, per_channel=False),
    "dynamic-u8-per-tensor": partial(_preset, "avx2", is_static=False, per_channel=False),
    "static-avx2": partial(_preset, "avx2", is_static=True),
    "static-avx512_vnni": partial(_preset, "avx512_vnni", is_static=True),
    "static-s8-per-tensor": partial(_preset, "avx512_vnni", is_static=True, per_channel=False),
    "weights-8": partial(WeightOnlyConfig, bits=8),
    "weights-8-float32": partial(WeightOnlyConfig, bits=8, accuracy_level=1),
    "weights-4": WeightOnlyConfig,
    "weights-4-float32": partial(WeightOnlyConfig, accuracy_level=1),
    "float16-stored": HalfPrecisionConfig,
}


class Session:
    """A file in onnxruntime, and the operators of the graph that it has made of it."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        optimized = path.with_name("optimized.onnx")
        options.optimized_model_filepath = str(optimized)
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        kinds = Counter(
            n.op_type for n in onnx.load(optimized, load_external_data=False).graph.node
        )
        self.kernels = {
            kind: count
            for kind, count in sorted(kinds.items())
            if any(part in kind for part in _PRODUCTS)
        }
        self._names = {value.name for value in self._session.get_inputs()}

    def __call__(self, feeds: Feeds) -> np.ndarray:
        taken = {name: array for name, array in feeds.items() if name in self._names}
        logits: np.ndarray = self._session.run(None, taken)[0]
        return logits


def trained(steps: int, folder: Path) -> tuple[Path, list[tuple[Feeds, int]], list[Feeds]]:
    """A classifier's file, held-out reviews with their labels, and some for calibration."""
    torch.manual_seed(0)
    examples = synthetic(steps * 32 + 500)
    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    model = AutoModelForSequenceClassification.from_pretrained(pretrained(), num_labels=2)
    names = sorted({example.label for example in examples})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for step in range(steps):
        batch = examples[step * 32 : step * 32 + 32]
        given = tokenizer([e.text for e in batch], padding=True, return_tensors="pt")
        labels = torch.tensor([names.index(e.label) for e in batch])
        model(**given, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    sample = dict(tokenizer(["one", "and two"], padding=True, return_tensors="pt").items())
    path = folder / "exported" / "model.onnx"
    export_onnx(model, [sample], path, outputs=["logits"])
    held_out = [
        (dict(tokenizer([e.text], return_tensors="np")), names.index(e.label))
        for e in examples[steps * 32 :]
    ]
    calibration = [
        dict(tokenizer([e.text], return_tensors="np")) for e in examples[: min(100, steps * 32)]
    ]
    return path, held_out, calibration


def size(path: Path) -> int:
    """Bytes of a file and of the weights beside it."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.stem}*"))


def main() -> None:
    parser = arguments(__doc__, rounds=60)
    parser.add_argument("--steps", type=int, default=60, help="of training (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], type=one_of(WAYS))
    options = parser.parse_args()
    results = Results("quantization", options.json)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path, held_out, calibration = trained(options.steps, folder)
        quantizer = ORTQuantizer.from_pretrained(path)
        ranges = quantizer.fit(calibration, AutoCalibrationConfig.percentiles())
        base_size = size(path)
        sessions = {"float32": Session(path, options.threads)}
        rows: dict[str, Row] = {"float32": {"size": 1.0}}
        for name in options.ways:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                quantizer.quantize(WAYS[name](), folder / name, calibration_tensors_range=ranges)
            made = folder / name / "model_quantized.onnx"
            rows[name] = {"size": size(made) / base_size}
            sessions[name] = Session(made, options.threads)
        wanted = [int(sessions["float32"](feeds).argmax()) for feeds, _ in held_out]
        for name, session in sessions.items():
            found = [int(session(feeds).argmax()) for feeds, _ in held_out]
            right = [label for _, label in held_out]
            rows[name] |= {
                "agreement": float(np.mean(np.equal(found, wanted))),
                "accuracy": float(np.mean(np.equal(found, right))),
                "kernels": session.kernels,
            }
            print(name, rows[name], flush=True)
        for title, (count, length) in SIZES.items():
            feeds: Feeds = {
                "input_ids": np.random.default_rng(0).integers(1000, 20000, (count, length)),
                "attention_mask": np.ones((count, length), np.int64),
                "token_type_ids": np.zeros((count, length), np.int64),
            }
            calls = {name: partial(session, feeds) for name, session in sessions.items()}
            timed = compared(alternate(calls, options.rounds, warm_up=5))
            print(table(title, timed), flush=True)
            for name, row in timed.items():
                rows[name][title] = row
        results.save(**{f"{options.threads} threads": rows})


if __name__ == "__main__":
    main()
