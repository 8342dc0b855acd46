"""Every kind of file that ortrain reads, with bits flipped and ends cut off."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from ortrain.cache import Cache
from ortrain.cli.ondevice.loop import arrays
from ortrain.cli.text_classification.classifier import load_classifier
from ortrain.cli.text_classification.output import Output
from ortrain.cli.usage import CommandError
from ortrain.deploy import export_onnx
from ortrain.errors import OrtrainError
from ortrain.files import checksums
from ortrain.ondevice import CheckpointState, Module, Optimizer, TrainStep, optim
from ortrain.ondevice.artifacts import LossType, generate_artifacts
from ortrain.program import Program
from tests.cli.tiny import make_model
from tests.fuzz.forked import each, told

REFUSED, SAME = "refused", "no effect"


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: what it is.
        file: a whole one, in its place.
        read: reads it there; all that it says.
    """

    name: str
    file: Path
    read: Callable[[], object]


def kinds(folder: Path) -> list[Kind]:
    """One whole file of each kind, in folders that are made."""
    return [
        *_artifacts(folder / "artifacts"),
        *_exports(folder / "exports"),
        *_model_folder(folder / "model"),
        _training_checkpoint(folder / "run"),
        *_cache(folder / "cache"),
        _data(folder),
    ]


def _artifacts(folder: Path) -> list[Kind]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    generate_artifacts(
        module,
        loss=LossType.MSELoss,
        optimizer=optim.AdamW(),
        artifact_directory=folder,
        ort_format=True,
        nominal_checkpoint=True,
        example_inputs=[torch.zeros(2, 3)],
    )
    x, y = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)

    def state() -> CheckpointState:
        return CheckpointState.load_checkpoint(folder / "checkpoint")

    def values(state: CheckpointState) -> object:
        items = (*state.parameters, *state.buffers)
        return {name: told(item.data) for name, item in items}, dict(state.properties), state.step

    def checkpoint(name: str) -> object:
        found = CheckpointState.load_checkpoint(folder / name)
        named = (found.description.parameters, found.description.states, found.learning_rate)
        return named, values(found) if name == "checkpoint" else ()

    def trained(training: str, evaluation: str, optimizer: str) -> object:
        found = state()
        module = Module(folder / training, found, folder / evaluation)
        update = Optimizer(folder / optimizer, module)
        losses = [told(module(x, y))]
        update.step()
        module.eval()
        return [*losses, told(module(x, y)), values(found)]

    def stepped(name: str) -> object:
        found = state()
        return [told(TrainStep(folder / name, found)(x, y)), values(found)]

    rows = [
        Kind("checkpoint", folder / "checkpoint", lambda: checkpoint("checkpoint")),
        Kind("nominal", folder / "nominal_checkpoint", lambda: checkpoint("nominal_checkpoint")),
    ]
    for suffix in ("onnx", "ort"):
        names = [f"{name}_model.{suffix}" for name in ("training", "eval", "optimizer")]
        rows += [Kind(name, folder / name, lambda names=names: trained(*names)) for name in names]
        step = f"train_step_model.{suffix}"
        rows.append(Kind(step, folder / step, lambda step=step: stepped(step)))
    return rows


def _exports(folder: Path) -> list[Kind]:
    torch.manual_seed(1)
    module = torch.nn.Linear(16, 16)
    path = folder / "model.onnx"
    export_onnx(module, [{"input": torch.zeros(2, 16)}], path, external_data_above=100)

    def read() -> object:
        program = Program.load(path)
        weights = program.graph.initializers.values()
        return program.text(), [told(w.const_value.numpy()) for w in weights if w.const_value]

    return [
        Kind("exported model.onnx", path, read),
        Kind("exported model.onnx.data", path.with_name("model.onnx.data"), read),
    ]


def _model_folder(folder: Path) -> list[Kind]:
    make_model(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    checksums.write(folder)

    def read() -> object:
        found = load_classifier(str(folder), ["no", "yes"], seed=0)
        weights = told(dict(found.model.state_dict()))
        return weights, found.labels, found.tokenizer("the film was good")["input_ids"]

    names = sorted(path.name for path in folder.iterdir())
    return [Kind(f"output's {name}", folder / name, read) for name in names]


def _training_checkpoint(folder: Path) -> Kind:
    folder.mkdir()
    output = Output(folder / "out")
    output.open(resume=False)
    weights = torch.arange(200, dtype=torch.float32)
    output.write_checkpoint({"identity": {"--seed": "0"}, "model": {"w": weights}, "steps": [1.5]})
    output.close()
    return Kind("state.pt", output.checkpoint, lambda: told(output.read_checkpoint()))


def _cache(folder: Path) -> list[Kind]:
    torch.manual_seed(2)
    export_onnx(torch.nn.Linear(4, 4), [{"input": torch.zeros(2, 4)}], folder / "made.onnx")
    made = [Program.load(folder / "made.onnx"), Program.load(folder / "made.onnx")]
    cache = Cache(folder / "entries")
    cache.programs(["key"], lambda: made)

    def read() -> object:
        found = cache.programs(["key"], lambda: made)
        return [program.serialize() for program in found]

    files = sorted(path for path in (folder / "entries").rglob("*") if path.is_file())
    files = [path for path in files if path.stat().st_size]
    return [Kind("cache entry", path, read) for path in files]


def _data(folder: Path) -> Kind:
    path = folder / "data.npz"
    rows = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    np.savez_compressed(path, x=rows, y=np.arange(6))
    return Kind("data.npz", path, lambda: told(arrays(path, ["x", "y"])))


# -- damage --------------------------------------------------------------------------------------


def flips(kind: Kind, count: int, generator: random.Random) -> list[tuple[str, bytes]]:
    """Contents with one bit flipped, and where."""
    content = kind.file.read_bytes()
    bits = generator.sample(range(8 * len(content)), min(count, 8 * len(content)))
    rows = []
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        rows.append((f"bit {bit}", bytes(changed)))
    return rows


def truncations(kind: Kind, count: int, generator: random.Random) -> list[tuple[str, bytes]]:
    """Contents whose end is missing, the empty one among them."""
    content = kind.file.read_bytes()
    ends = [0, *generator.sample(range(1, len(content)), min(count - 1, len(content) - 1))]
    return [(f"first {end} bytes", content[:end]) for end in ends]


def outcomes(kind: Kind, damaged: Sequence[tuple[str, bytes]]) -> list[str]:
    """What becomes of reading each: refused, no effect, or what should not be."""
    whole = kind.file.read_bytes()
    expected: list[object] = []

    def read(item: tuple[str, bytes]) -> str:
        where, content = item
        if not expected:
            expected.append(kind.read())
        # A reader may put a damaged file right, as a cache does: the folder starts anew.
        kind.file.parent.mkdir(parents=True, exist_ok=True)
        kind.file.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = kind.read()
        except (OrtrainError, CommandError) as error:
            return REFUSED if str(error).strip() else f"{where}: an error without words"
        except Exception as error:
            return f"{where}: {type(error).__name__}: {error}"[:300]
        finally:
            kind.file.parent.mkdir(parents=True, exist_ok=True)
            kind.file.write_bytes(whole)
        return SAME if found == expected[0] else f"{where}: was accepted, and says something else"

    return each(damaged, read)
