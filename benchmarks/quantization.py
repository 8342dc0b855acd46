"""A MiniLM classifier quantized in each way: size, kernels, answers, and speed against float32.

    python benchmarks/quantization.py [--rounds 60] [--threads 1] [--ways dynamic-auto eager …]

all-MiniLM-L6-v2 is trained on synthetic reviews first, exported once, and quantized in each way;
PyTorch's own ways are beside them, torchao's where it can be imported (a folder of
``pip install --no-deps --target`` on ``PYTHONPATH`` will do). On held-out reviews, ``agreement`` is
the share of predictions that are those of float32, ``accuracy`` that of right ones. All take turns
on one input of each size; ``kernels`` are the operators that multiply in the graph that onnxruntime
has made of the file. Presets that write the same file as another are measured once.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from inference import EAGER, Eager, Feeds
from loss_curve import pretrained, synthetic
from measurement import Results, Row, alternate, arguments, compared, one_of, ratio, reason, table
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ortrain.deploy import export_onnx
from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    HalfPrecisionConfig,
    ORTQuantizer,
    WeightOnlyConfig,
)

# Rows x words, and of how many rounds of the small one there is one of it.
SIZES = {"1 x 32": (1, 32, 1), "8 x 128": (8, 128, 4)}
BASE = "float32"
_PRODUCTS = ("MatMul", "Gemm", "Conv", "Attention", "QLinear", "DequantizeLinear")


def _preset(name: str, **given: Any) -> Any:
    return getattr(AutoQuantizationConfig, name)(**given)


_DYNAMIC = ("auto", "avx2", "avx512", "avx512_vnni", "arm64", "ppc64le")
WAYS: dict[str, Callable[[], Any]] = {
    **{f"dynamic-{name}": partial(_preset, name, is_static=False) for name in _DYNAMIC},
    "dynamic-s8-per-tensor": partial(_preset, "avx512_vnni", is_static=False, per_channel=False),
    **{f"static-{name}": partial(_preset, name, is_static=True) for name in _DYNAMIC},
    "static-tensorrt": partial(_preset, "tensorrt"),
    "static-s8-per-tensor": partial(_preset, "avx512_vnni", is_static=True, per_channel=False),
    "weights-8": partial(WeightOnlyConfig, bits=8),
    "weights-8-float32": partial(WeightOnlyConfig, bits=8, accuracy_level=1),
    "weights-4": WeightOnlyConfig,
    "weights-4-float32": partial(WeightOnlyConfig, accuracy_level=1),
    "float16-stored": HalfPrecisionConfig,
    "bfloat16-stored": partial(HalfPrecisionConfig, dtype="bfloat16"),
    "float16-computed": partial(HalfPrecisionConfig, compute=True),
}
OPTIMIZED = {"O2": None, "O2 + dynamic-auto": WAYS["dynamic-auto"]}
CONTESTANTS = (*EAGER, *OPTIMIZED, *WAYS)


class Session:
    """A file in onnxruntime, and the operators of the graph that it has made of it."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Else threads of a session that waits are in the way of the one whose turn it is.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        optimized = path.with_name("optimized.onnx")
        options.optimized_model_filepath = str(optimized)
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        kinds = Counter(
            n.op_type for n in onnx.load(optimized, load_external_data=False).graph.node
        )
        for leftover in optimized.parent.glob("optimized.onnx*"):
            leftover.unlink()
        self.kernels = {
            kind: count
            for kind, count in sorted(kinds.items())
            if any(part in kind for part in _PRODUCTS)
        }
        # Beside the file lie its weights, where they are not in it.
        self.size = sum(each.stat().st_size for each in path.parent.glob(f"{path.stem}*"))
        self._names = {value.name for value in self._session.get_inputs()}

    def __call__(self, feeds: Feeds) -> np.ndarray:
        taken = {name: array for name, array in feeds.items() if name in self._names}
        logits: np.ndarray = self._session.run(None, taken)[0]
        return logits


class Classifier:
    """A model that was trained, its file, held-out reviews with labels, and some for calibration.

    Args:
        steps: of training.
        folder: for the file.
    """

    def __init__(self, steps: int, folder: Path) -> None:
        torch.manual_seed(0)
        examples = synthetic(steps * 32 + 500)
        tokenizer = AutoTokenizer.from_pretrained(pretrained())
        self.model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
            pretrained(), num_labels=2
        )
        names = sorted({example.label for example in examples})
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.model.train()
        for step in range(steps):
            batch = examples[step * 32 : step * 32 + 32]
            given = tokenizer([e.text for e in batch], padding=True, return_tensors="pt")
            labels = torch.tensor([names.index(e.label) for e in batch])
            self.model(**given, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.model.eval()
        sample = dict(tokenizer(["one", "and two"], padding=True, return_tensors="pt").items())
        self.path = folder / "exported" / "model.onnx"
        export_onnx(self.model, [sample], self.path, outputs=["logits"])
        self.held_out: list[tuple[Feeds, int]] = [
            (dict(tokenizer([e.text], return_tensors="np")), names.index(e.label))
            for e in examples[steps * 32 :]
        ]
        self.calibration: list[Feeds] = [
            dict(tokenizer([e.text], return_tensors="np")) for e in examples[: min(100, steps * 32)]
        ]


def made(
    classifier: Classifier, names: list[str], folder: Path, threads: int
) -> tuple[dict[str, Session | Eager], dict[str, Row]]:
    """The contestants that can be had, float32 first, and rows of those that can not.

    Args:
        classifier: that all of them are made of.
        names: of ``CONTESTANTS``.
        folder: for their files.
        threads: of each session.
    """
    sources = {"": classifier.path}
    if any(name in OPTIMIZED for name in names):
        level = AutoOptimizationConfig.with_optimization_level("O2")
        target = ORTOptimizer.from_pretrained(classifier.path).optimize(level, folder / "O2")
        sources["O2"] = Path(target) / "model_optimized.onnx"
    quantizer = ORTQuantizer.from_pretrained(classifier.path)
    ranges = quantizer.fit(classifier.calibration, AutoCalibrationConfig.percentiles())
    found: dict[str, Session | Eager] = {BASE: Session(classifier.path, threads)}
    rows: dict[str, Row] = {}
    known: dict[str, str] = {}
    for name in names:
        config = {**WAYS, **OPTIMIZED}.get(name)
        try:
            if name in EAGER:
                found[name] = EAGER[name](classifier.model)
                found[name](classifier.held_out[0][0])
                continue
            path = sources["O2" if name in OPTIMIZED else ""]
            if config is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ORTQuantizer.from_pretrained(path).quantize(
                        config(), folder / name, calibration_tensors_range=ranges
                    )
                (path,) = (folder / name).glob("*_quantized.onnx")
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest in known:
                rows[name] = {"same_file_as": known[digest]}
                continue
            found[name] = Session(path, threads)
            known[digest] = name
        except Exception as error:  # one that cannot be had leaves the others to be measured
            found.pop(name, None)
            rows[name] = {"skipped": reason(error).removeprefix("RuntimeError: ")}
    return found, rows


def answered(
    found: dict[str, Session | Eager], held_out: list[tuple[Feeds, int]]
) -> dict[str, Row]:
    """Size, kernels and answers of each contestant."""
    wanted = [int(found[BASE](feeds).argmax()) for feeds, _ in held_out]
    right = [label for _, label in held_out]
    rows: dict[str, Row] = {}
    for name, contestant in found.items():
        given = [int(contestant(feeds).argmax()) for feeds, _ in held_out]
        rows[name] = {
            "bytes": contestant.size,
            "size": contestant.size / found[BASE].size,
            "agreement": float(np.mean(np.equal(given, wanted))),
            "accuracy": float(np.mean(np.equal(given, right))),
            "kernels": contestant.kernels,
        }
        print(name, rows[name], flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__, rounds=60)
    parser.add_argument("--steps", type=int, default=60, help="of training (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--ways", nargs="+", default=[*CONTESTANTS], type=one_of(CONTESTANTS))
    options = parser.parse_args()
    results = Results("quantization", options.json)
    with tempfile.TemporaryDirectory() as temporary:
        classifier = Classifier(options.steps, Path(temporary))
        torch.set_num_threads(options.threads)
        found, missing = made(classifier, options.ways, Path(temporary), options.threads)
        rows = answered(found, classifier.held_out)
        for title, (count, length, seldom) in SIZES.items():
            feeds: Feeds = {
                "input_ids": np.random.default_rng(0).integers(1000, 20000, (count, length)),
                "attention_mask": np.ones((count, length), np.int64),
                "token_type_ids": np.zeros((count, length), np.int64),
            }
            calls = {name: partial(contestant, feeds) for name, contestant in found.items()}
            times = alternate(calls, max(1, options.rounds // seldom), warm_up=2)
            timed = compared(times, BASE)
            print(table(title, timed), flush=True)
            for name, row in timed.items():
                if "eager" in times:
                    row["ratio_eager"] = ratio(times[name], times["eager"])
                rows[name][title] = row
    told = {name: {**rows, **missing}[name] for name in (BASE, *options.ways)}
    for name, row in missing.items():
        print(name, row)
    results.save(**{f"{options.threads} threads": told})


if __name__ == "__main__":
    main()
