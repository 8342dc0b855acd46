"""States and checkpoints: those of the original, by name, and ours."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain.classic import ORTTrainer, checkpoint, first, optim
from ortrain.errors import InputError, MissingPackage, OrtrainWarning, SaveError
from tests.classic import models
from tests.classic.test_training import NAMES, expect_equal

Trainer = Any


# -- h5py, or what these tests need of it ----------------------------------------------------------


class Value:
    """A dataset: ``[()]`` gives numpy's value, or bytes for a string."""

    def __init__(self, value: Any) -> None:
        self.value = value.encode() if isinstance(value, str) else value

    def __getitem__(self, key: tuple[()]) -> Any:
        return self.value if isinstance(self.value, bytes) else np.asarray(self.value)[()]


class Group:
    """A group of an HDF5 file."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree

    def create_group(self, name: str) -> Group:
        return Group(self.tree.setdefault(name, {}))

    def __setitem__(self, name: str, value: Any) -> None:
        *groups, last = name.split("/")
        tree = self.tree
        for group in groups:
            tree = tree.setdefault(group, {})
        tree[last] = value

    def items(self) -> list[tuple[str, Any]]:
        return [(k, Group(v) if isinstance(v, dict) else Value(v)) for k, v in self.tree.items()]


class File(Group):
    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        self.path, self.mode = Path(path), mode
        super().__init__(pickle.loads(self.path.read_bytes()[4:]) if mode == "r" else {})

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.mode == "w":
            self.path.write_bytes(b"HDF5" + pickle.dumps(self.tree))


def stand_in() -> ModuleType:
    module: Any = ModuleType("h5py")
    module.File, module.Group = File, Group
    module.is_hdf5 = lambda path: Path(path).read_bytes()[:4] == b"HDF5"
    return module


@pytest.fixture(params=["h5py", "a stand-in"])
def hdf5(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "h5py":
        pytest.importorskip("h5py")
    else:
        monkeypatch.setitem(sys.modules, "h5py", stand_in())


# -- what is saved is what goes on -----------------------------------------------------------------


def trainers(name: str, generation: int) -> tuple[nn.Module, Trainer]:
    model = models.classifier()
    if generation == 2:
        return model, models.second(model, models.config_of(name, model))
    with torch.no_grad():
        return model, models.of_first(model, name)


def steps(trainer: Trainer, data: Any) -> None:
    for x, y in data:
        rate = () if isinstance(trainer, ORTTrainer) else (models.RATE,)
        trainer.train_step(x, y, *rate)


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_training_goes_on_from_its_state(name: str, generation: int) -> None:
    data = list(models.batches(9))
    straight, trainer = trainers(name, generation)
    steps(trainer, data[:5])
    state = trainer.state_dict()
    steps(trainer, data[5:])
    resumed, other = trainers(name, generation)
    steps(other, data[:2])  # of another history
    other.load_state_dict(state, strict=True)
    steps(other, data[5:])
    expect_equal(resumed, straight)
    if generation == 2:
        assert other._train_step_info.step == 9


@pytest.mark.parametrize("name", NAMES)
def test_names_and_counts_of_the_flat_state_are_the_originals(name: str) -> None:
    model, trainer = trainers(name, 1)
    weights = {n for n, _ in model.named_parameters()}
    expected = set(weights)
    if name != "SGDOptimizer":
        expected |= {f"Moment_{i}_{n}" for n in weights for i in (1, 2)}
    if name == "AdamOptimizer":
        expected |= {f"Update_Count_{n}" for n in weights}
    if name == "LambOptimizer":
        expected |= {"Step"}
    counts = expected & {"Step", "Update_Count_hidden.weight"}
    assert set(trainer.state_dict()) == expected
    assert [trainer.state_dict()[n].tolist() for n in counts] == [[1]] * len(counts)
    steps(trainer, models.batches(3))
    assert [trainer.state_dict()[n].tolist() for n in counts] == [[4]] * len(counts)
    assert set(trainer.state_dict(include_optimizer_state=False)) == weights


def original(name: str, count: int = 7, prefix: str = "") -> dict[str, torch.Tensor]:
    """A flat state as the original wrote it, with generated numbers."""
    generator = torch.Generator().manual_seed(5)
    found: dict[str, torch.Tensor] = {}
    for weight, p in models.classifier().named_parameters():
        own = prefix + weight
        found[own] = torch.randn(p.shape, generator=generator)
        found[f"{own}_fp16"] = found[own].half()
        found[f"Moment_1_{own}"] = 0.1 * torch.randn(p.shape, generator=generator)
        found[f"Moment_2_{own}"] = torch.rand(p.shape, generator=generator)
        if name == "AdamOptimizer":
            found[f"Update_Count_{own}"] = torch.tensor([count])
    if name == "LambOptimizer":
        found["Step"] = torch.tensor([count])
    return found


def stepped(name: str, state: dict[str, torch.Tensor], count: int) -> nn.Module:
    """The next update from such a state, computed by the formulas of the original's operators."""
    model = models.classifier().double()
    with torch.no_grad():
        for weight, p in model.named_parameters():
            p.copy_(state[weight])
    x, y = next(models.batches(1, dtype=torch.float64))
    nn.functional.cross_entropy(model(x), y).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    with torch.no_grad():
        for weight, p in model.named_parameters():
            assert p.grad is not None
            g = p.grad / max(1.0, float(norm))
            m = 0.9 * state[f"Moment_1_{weight}"].double() + 0.1 * g
            v = 0.999 * state[f"Moment_2_{weight}"].double() + 0.001 * g * g
            if name == "AdamOptimizer":
                m, v = m / (1 - 0.9**count), v / (1 - 0.999**count)
            r = m / (v.sqrt() + (1e-8 if name == "AdamOptimizer" else 1e-6))
            p -= 0.1 * r * (p.norm() / r.norm() if name == "LambOptimizer" else 1.0)
    return model


@pytest.mark.parametrize("prefix", ["", "model_."])
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_checkpoint_of_the_first_generation_is_gone_on_from(
    name: str, prefix: str, tmp_path: Path
) -> None:
    state = original(name, 7, prefix)
    torch.save({"model": state, "epoch": 3}, tmp_path / "ORT_checkpoint.ort.pt")
    expected = stepped(name, original(name), 7)
    for trainer, model in (
        (models.of_first(m := models.classifier(), name), m),
        (models.second(m := models.classifier(), flat_config(name)), m),
    ):
        if isinstance(trainer, ORTTrainer):
            more = checkpoint.experimental_load_checkpoint(trainer, tmp_path, strict=True)
            trainer.train_step(*next(models.batches(1)))
        else:
            more = first.load_checkpoint(trainer, tmp_path, strict=True)
            trainer.train_step(*next(models.batches(1)), 0.1)
        assert more == {"epoch": 3}
        expect_equal(model, expected.float())


def flat_config(name: str) -> Any:
    if name == "AdamOptimizer":
        return optim.AdamConfig(lr=0.1)
    return optim.LambConfig(lr=0.1)


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_parts_of_zero_are_put_together_by_rank(name: str, tmp_path: Path) -> None:
    whole, world = original(name), 11
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    for key, value in whole.items():
        for rank, file in enumerate(files):
            if not key.startswith("Moment_"):
                file[key] = value
            elif len(parts := value.flatten().chunk(world)) > rank:
                file[f"{key}_view_{rank}"] = parts[rank]
    for rank, file in enumerate(files):
        torch.save({"model": file}, tmp_path / f"ORT_checkpoint.ZeRO.{rank}.{world - 1}.ort.pt")
    model = models.classifier()
    trainer = models.of_first(model, name)
    first.load_checkpoint(trainer, tmp_path, strict=True)
    trainer.train_step(*next(models.batches(1)), 0.1)
    expect_equal(model, stepped(name, whole, 7).float())


def nested(name: str, precision: str) -> dict[str, Any]:
    """The same numbers as the second generation wrote them."""
    state, rows = original(name), dict[str, Any]()
    names = [n for n, _ in models.classifier().named_parameters()]
    for n in names:
        keys = ["Moment_1", "Moment_2", *(["Update_Count"] if name == "AdamOptimizer" else [])]
        rows[n] = {key: state[f"{key}_{n}"].numpy() for key in keys}
    if name == "LambOptimizer":
        rows["shared_optimizer_state"] = {"Step": state["Step"].numpy()}
    return {
        "model": {precision: {n: state[n].numpy() for n in names}},
        "optimizer": rows,
        "trainer_options": {
            "mixed_precision": False,
            "zero_stage": 0,
            "world_rank": 0,
            "world_size": 1,
            "optimizer_name": name,
            "data_parallel_size": 1,
            "horizontal_parallel_size": 1,
        },
        "train_step_info": {"optimization_step": 6, "step": 12},
    }


@pytest.mark.parametrize("precision", ["fp32", "full_precision"])
@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.usefixtures("hdf5")
def test_a_checkpoint_of_the_second_generation_is_gone_on_from(
    name: str, precision: str, tmp_path: Path
) -> None:
    user = {"epoch": 3, "best": 0.5, "rows": [1, 2], "mean": np.ones(3), "t": torch.ones(2)}
    checkpoint.save(nested(name, precision), tmp_path / "old.h5", user)
    model = models.classifier()
    trainer = models.second(model, flat_config(name))
    found = trainer.load_checkpoint(tmp_path / "old.h5")
    assert {**found, "mean": 0, "t": 0} == {**user, "mean": 0, "t": 0}
    assert torch.equal(found["t"], user["t"])  # type: ignore[arg-type]
    trainer.train_step(*next(models.batches(1)))
    expect_equal(model, stepped(name, original(name), 7).float())
    info = trainer._train_step_info
    assert (info.optimization_step, info.step) == (7, 13)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("hdf5")
def test_a_checkpoint_of_ours_is_gone_on_from(name: str, tmp_path: Path) -> None:
    data = list(models.batches(9))
    straight, trainer = trainers(name, 2)
    steps(trainer, data[:5])
    trainer.save_checkpoint(tmp_path / "c.h5", {"epoch": 1})
    trainer.save_checkpoint(tmp_path / "weights.h5", include_optimizer_states=False)
    steps(trainer, data[5:])
    resumed, other = trainers(name, 2)
    assert other.load_checkpoint(tmp_path / "c.h5") == {"epoch": 1}
    steps(other, data[5:])
    expect_equal(resumed, straight)
    _weights_only, third = trainers(name, 2)
    assert third.load_checkpoint(tmp_path / "weights.h5") == {}
    with pytest.raises(SaveError, match="already"):
        trainer.save_checkpoint(tmp_path / "c.h5")


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.usefixtures("hdf5")
def test_the_parts_of_the_second_generations_zero_are_put_together(
    mixed: bool, tmp_path: Path
) -> None:
    whole, world = nested("AdamOptimizer", "full_precision"), 3
    paths = []
    for rank in range(world):
        state = nested("AdamOptimizer", "full_precision")
        own = {"world_rank": rank, "world_size": world, "zero_stage": 1, "mixed_precision": mixed}
        state["trainer_options"] |= own
        state["partition_info"] = {}
        for n, row in whole["optimizer"].items():
            shape = np.array(row["Moment_1"].shape)
            state["partition_info"][n] = {"original_dim": shape}
            for key in ("Moment_1", "Moment_2"):
                state["optimizer"][n][key] = np.array_split(row[key].ravel(), world)[rank]
            if mixed:
                weight = whole["model"]["full_precision"][n]
                cut = np.array_split(weight.ravel(), world)[rank]
                state["model"]["full_precision"][n] = cut
        checkpoint.save(state, tmp_path / f"{rank}.h5")
        paths.append(tmp_path / f"{rank}.h5")
    model = models.classifier()
    trainer = models.second(model, flat_config("AdamOptimizer"))
    trainer.load_checkpoint(*reversed(paths))
    trainer.train_step(*next(models.batches(1)))
    expect_equal(model, stepped("AdamOptimizer", original("AdamOptimizer"), 7).float())
    weights = checkpoint.aggregate_checkpoints(paths)
    assert torch.equal(weights["hidden.weight"], original("AdamOptimizer")["hidden.weight"])
    with pytest.raises(InputError, match="written by 3 processes"):
        trainer.load_checkpoint(*paths[1:])
    with pytest.raises(InputError, match="written by 3 processes"):
        checkpoint.aggregate_checkpoints([paths[0], paths[1], paths[1]])


@pytest.mark.usefixtures("hdf5")
def test_names_with_slashes_come_back(tmp_path: Path) -> None:
    state = {
        "model": {"fp32": {"a/b": np.ones(2), "a/c/d": np.zeros(1), "e": np.ones(())}},
        "optimizer": {"a/b": {"Moment_1": np.ones(2)}, "e": {"Moment_1": np.ones(())}},
        "trainer_options": {"zero_stage": 0},
    }
    checkpoint.save(state, tmp_path / "c.h5")
    found, _ = checkpoint.load([tmp_path / "c.h5"])
    assert set(found["model"]["fp32"]) == {"a/b", "a/c/d", "e"}
    assert set(found["optimizer"]) == {"a/b", "e"}
    with pytest.raises(SaveError, match="'/a'"):
        checkpoint.save({"model": {"fp32": {"/a": np.ones(1)}}}, tmp_path / "d.h5")


@pytest.mark.usefixtures("hdf5")
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    state = {**nested("AdamOptimizer", "fp32"), "user_dict": pickle.dumps({"f": os.system}).hex()}
    checkpoint.save(state, tmp_path / "c.h5")
    with pytest.raises(InputError, match="would run code"):
        checkpoint.load([tmp_path / "c.h5"])
    torch.save({"model": {}, "f": os.system}, tmp_path / "ORT_checkpoint.ort.pt")
    with pytest.raises(InputError, match="cannot read the checkpoint"):
        first.load_checkpoint(models.of_first(models.classifier()), tmp_path)


def test_without_h5py_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    trainer = models.second(models.classifier())
    with pytest.raises(MissingPackage, match=r"ortrain\[classic\]"):
        trainer.save_checkpoint(tmp_path / "c.h5")
    with pytest.raises(MissingPackage, match=r"ortrain\[classic\]"):
        trainer.load_checkpoint(tmp_path / "c.h5")
    assert not [*tmp_path.iterdir()]


# -- what does not fit -----------------------------------------------------------------------------


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s["model"]["fp32"].pop("hidden.bias"), "it lacks hidden.bias"),
        (lambda s: s["model"]["fp32"].update(other=np.ones(1)), "it has other besides"),
        (lambda s: s["optimizer"].pop("hidden.bias"), "it lacks hidden.bias"),
        (lambda s: s["optimizer"].update(other={}), "it has other besides"),
        (lambda s: s["optimizer"]["hidden.bias"].pop("Moment_2"), "hidden.bias"),
        (lambda s: s["optimizer"]["hidden.bias"].update(Moment_1=np.ones(3)), r"\[3\]"),
        (lambda s: s["model"]["fp32"].update({"hidden.bias": np.ones(5)}), r"\[5\]"),
        (lambda s: s["trainer_options"].update(optimizer_name=b"SGDOptimizer"), "SGDOptimizer"),
        (lambda s: s.pop("model"), "no 'model'"),
    ],
)
def test_a_state_that_does_not_fit_is_told_and_changes_nothing(change: Any, told: str) -> None:
    state = nested("AdamOptimizer", "fp32")
    change(state)
    model = models.classifier()
    trainer = models.second(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(InputError, match=told):
        trainer.load_state_dict(state)
    assert same(model, before)
    assert trainer._train_step_info.step == 0


def test_without_strict_what_has_the_same_names_is_taken_over() -> None:
    model = models.classifier()
    trainer = models.second(model)
    state = nested("AdamOptimizer", "fp32")
    del state["model"]["fp32"]["hidden.bias"], state["optimizer"]["output.bias"]
    before = model.hidden.bias.clone()  # type: ignore[union-attr]
    trainer.load_state_dict(state, strict=False)
    assert torch.equal(model.hidden.bias, before)  # type: ignore[arg-type, union-attr]
    expected = original("AdamOptimizer")["output.weight"]
    assert torch.equal(model.output.weight, expected)  # type: ignore[arg-type, union-attr]


def test_names_that_the_flat_state_has_besides_are_told() -> None:
    trainer = models.of_first(models.classifier())
    state = {**original("AdamOptimizer"), "other.weight": torch.ones(2)}
    with pytest.raises(InputError, match=r"other\.weight"):
        trainer.load_state_dict(state, strict=True)
    with pytest.warns(OrtrainWarning, match=r"other\.weight"):
        trainer.load_state_dict(state)
    with pytest.raises(InputError, match=r"\[2\]"):
        trainer.load_state_dict({"hidden.bias": torch.ones(2)})


def test_weights_that_a_flat_state_lacks_are_told() -> None:
    state = original("AdamOptimizer")
    del state["hidden.bias"], state["output.weight"]
    trainer = models.of_first(models.classifier())
    for strict in (True, False):
        with pytest.warns(OrtrainWarning, match=r"no hidden\.bias, output\.weight, which stay"):
            trainer.load_state_dict(state, strict=strict)


def test_a_state_without_the_count_of_batches_is_whole() -> None:
    description = {
        "inputs": [("input", ["n", 6]), ("y", ["n"])],
        "outputs": [("loss", [], True)],
    }
    make = lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))  # noqa: E731
    trainer = models.second(make(), description=description)
    trainer.train_step(*next(models.batches(1)))
    state = trainer.state_dict()
    del state["model"]["full_precision"]["1.num_batches_tracked"]
    other = models.second(copy := make(), description=description)
    other.load_state_dict(state)
    expected = state["model"]["full_precision"]["1.running_var"]
    assert np.array_equal(copy[1].running_var.numpy(), expected)
    del state["model"]["full_precision"]["1.running_var"]
    with pytest.raises(InputError, match="running_var"):
        other.load_state_dict(state)


@pytest.mark.parametrize("content", [b"", b"no file of torch", None])
def test_a_file_that_is_no_checkpoint_is_told(content: bytes | None, tmp_path: Path) -> None:
    trainer = models.of_first(models.classifier())
    with pytest.raises(InputError, match="there is no checkpoint"):
        first.load_checkpoint(trainer, tmp_path)
    path = tmp_path / "ORT_checkpoint.ort.pt"
    if content is None:
        torch.save([1, 2], path)
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"checkpoint"):
        first.load_checkpoint(trainer, tmp_path)


def test_a_checkpoint_needs_a_folder_that_is_there(tmp_path: Path) -> None:
    trainer = models.of_first(models.classifier())
    with pytest.raises(SaveError, match="there is no folder"):
        first.save_checkpoint(trainer, tmp_path / "none")
    first.save_checkpoint(trainer, tmp_path, "mine", {"epoch": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["mine.ort.pt"]
    assert first.load_checkpoint(trainer, tmp_path, "mine") == {"epoch": 2}


def test_tied_weights_are_one_by_both_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = models.classifier(Tied)
    description = {"inputs": [("x", ["n", 6]), ("y", ["n"])], "outputs": [("loss", [], True)]}
    trainer = models.second(model, description=description)
    x, y = next(models.batches(1))
    trainer.train_step(x, y)
    state = trainer.state_dict()
    assert set(state["model"]["full_precision"]) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert set(state["optimizer"]) == {"a.weight", "a.bias", "b.bias"}
    del state["model"]["full_precision"]["b.weight"]  # as the original had it
    other = models.second(copy := models.classifier(Tied), description=description)
    other.load_state_dict(state)
    expect_equal(copy, model)
