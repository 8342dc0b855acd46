"""Processor seconds until a model trains at one size, a second and a third, beside Dynamo alone.

    python benchmarks/traces.py [bert-4 gpt2-4] [--contestants dynamo aten ortmodule]

Dynamo alone runs its graphs in PyTorch; `aten` and `onnxruntime` are steps of the backend of
`torch.compile`, `ortmodule` is `ORTModule`. With `-regions` each layer is compiled for itself. Each
run is a process of its own on one thread, with dropout, and layers that are narrow: what is
measured is the way to the graphs, with a step at each size.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from measurement import ProcessFailed, Results, Row, arguments, in_a_process, one_of

SIZES = ((3, 7), (4, 9), (2, 8))
WIDE: Any = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
CONTESTANTS = (
    "dynamo", "aten", "onnxruntime", "ortmodule", "dynamo-regions", "aten-regions",
    "onnxruntime-regions",
)  # fmt: skip


def _bert(layers: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, **WIDE))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=1000))


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = {"d_model": 64, "num_layers": 4, "d_ff": 128, "num_heads": 4, "d_kv": 16}
    config["decoder_start_token_id"] = 0
    return T5ForConditionalGeneration(T5Config(**config))


def _whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers: Any = {"encoder_layers": 4, "decoder_layers": 4, "max_source_positions": 20}
    heads: Any = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    width: Any = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 1000}
    tokens: Any = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    config = WhisperConfig(num_mel_bins=8, **layers, **heads, **width, **tokens)
    return WhisperForConditionalGeneration(config)


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: Any = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 4}
    return ViTForImageClassification(ViTConfig(hidden_dropout_prob=0.1, **sizes, **WIDE))


def _mlp() -> Any:
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(),
                nn.Linear(64, 4),
            )  # fmt: skip

        def forward(self, features: Any, labels: Any) -> Any:
            return (nn.functional.cross_entropy(self.layers(features), labels),)

    return Mlp()


def _ids(rows: int, length: int) -> Row:
    import torch

    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    ids = torch.randint(5, 900, (rows, length))
    return {"input_ids": ids, "attention_mask": mask}


def _classes(rows: int, length: int) -> Row:
    import torch

    return {**_ids(rows, length), "labels": torch.randint(0, 2, (rows,))}


def _texts(rows: int, length: int) -> Row:
    given = _ids(rows, length)
    return {**given, "labels": given["input_ids"]}


def _sounds(rows: int, length: int) -> Row:
    import torch

    features = torch.randn(rows, 8, 40)
    return {"input_features": features, "labels": _ids(rows, length)["input_ids"]}


def _images(rows: int, length: int) -> Row:
    import torch

    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 2, (rows,))}


def _features(rows: int, length: int) -> Row:
    import torch

    return {"features": torch.randn(rows, 32), "labels": torch.randint(0, 4, (rows,))}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int, int], Row]]] = {
    "bert-4": (lambda: _bert(4), _classes),
    "bert-12": (lambda: _bert(12), _classes),
    "gpt2-4": (_gpt2, _texts),
    "t5-4": (_t5, _texts),
    "whisper-4": (_whisper, _sounds),
    "vit-4": (_vit, _images),
    "mlp": (_mlp, _features),
}


def _ready(model: Any, name: str) -> Any:
    """The model as a contestant calls it."""
    import torch

    engine, _, regions = name.partition("-")
    if engine == "ortmodule":
        from ortrain import Options, ORTModule

        return ORTModule(model, options=Options(engine="aten"))
    backend: Any = lambda graph, _: graph.forward  # noqa: E731
    options: Any = None
    if engine != "dynamo":
        backend, options = "ortrain", {"engine": engine}
    if not regions:
        return torch.compile(model, backend=backend, options=options)
    for layers in [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]:
        for layer in layers:
            layer.compile(backend=backend, options=options)
    return model


def child(workload: str, name: str) -> Row:
    """The seconds of one process."""
    import torch
    import transformers  # noqa: F401  (of all contestants alike)

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    methods = ("debug", "info", "warning", "warning_once", "warning_advice", "error")
    known: Any = {getattr(logging.Logger, each, None) for each in methods} - {None}
    torch._dynamo.config.ignore_logging_functions = known
    make, batch = MODELS[workload]
    torch.manual_seed(0)
    model = make().train()
    busy = time.process_time()
    if not name.startswith("dynamo"):
        import ortrain.frontend.backend
        import ortrain.module  # noqa: F401
    imports = time.process_time() - busy
    call, seconds = _ready(model, name), []
    for rows, length in SIZES:
        given = batch(rows, length)
        busy = time.process_time()
        output = call(**given)
        loss = output["loss"] if isinstance(output, dict) else output[0]
        loss.backward()
        seconds.append(round(time.process_time() - busy, 3))
    return {"imports": round(imports, 3), "sizes": seconds, "all": round(sum(seconds), 3)}


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("workloads", nargs="*", default=[*MODELS])
    parser.add_argument(
        "--contestants", nargs="+", default=["dynamo", "aten", "ortmodule"],
        type=one_of(CONTESTANTS),
    )  # fmt: skip
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    results = Results("traces", options.json)
    for workload in options.workloads:
        runs: dict[str, list[Row]] = {name: [] for name in options.contestants}
        found: dict[str, Any] = {}
        for _ in range(options.rounds):
            for name, rows in runs.items():
                if name in found:
                    continue
                try:
                    rows.append(in_a_process(__file__, workload, name))
                except ProcessFailed as failure:
                    found[name] = {"skipped": str(failure)}
        for name, rows in runs.items():
            found.setdefault(name, sorted(rows, key=lambda row: float(row["all"]))[len(rows) // 2])
            print(f"{workload:10} {name:20} {found[name]}", flush=True)
        results.save(workloads={workload: found})


if __name__ == "__main__":
    main()
