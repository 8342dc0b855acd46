"""Several processes train one model: gradients, ZeRO, and who is who."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ortrain.classic import first, ranks
from ortrain.errors import InputError
from tests.classic import models, process
from tests.processes import launch

SETTINGS: list[dict[str, Any]] = [
    {"name": name, "generation": generation, "accumulation": accumulation, "zero": zero}
    for name, generation, accumulation, zero in [
        ("AdamOptimizer", 1, 4, 0),
        ("LambOptimizer", 2, 4, 0),
        ("AdamOptimizer", 2, 1, 1),
        ("LambOptimizer", 1, 2, 1),
    ]
]
for index, row in enumerate(SETTINGS):
    row["folder"] = f"checkpoint-{index}"
LONG: list[dict[str, Any]] = [
    {"name": name, "generation": generation, "accumulation": 4, "steps": 200}
    for name in ("AdamOptimizer", "LambOptimizer")
    for generation in (1, 2)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classic") / "two"


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    uneven = {"name": "AdamOptimizer", "generation": 2, "uneven": True}
    return launch(Path(process.__file__), folder, 2, [*SETTINGS, *LONG, uneven])


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_two_processes_train_as_one_with_all_rows_does(index: int, results: Any) -> None:
    expect_as_in_pytorch(SETTINGS[index], results[index]["ranks"])


def expect_as_in_pytorch(settings: dict[str, Any], ranks: Any) -> None:
    """Compares losses and weights of two processes with those of PyTorch in one."""
    one, other = ranks
    plain = models.classifier()
    losses = models.train_plain(
        plain,
        models.plain_optimizer(settings["name"], plain),
        list(models.batches(settings.get("steps", process.STEPS))),
        settings["accumulation"],
        lambda _: models.RATE,
    )
    both = [(a + b) / 2 for a, b in zip(one["losses"], other["losses"], strict=True)]
    assert both == pytest.approx(losses, abs=1e-5)
    for name, parameter in plain.named_parameters():
        assert torch.equal(one["weights"][name], other["weights"][name])
        torch.testing.assert_close(one["weights"][name], parameter, rtol=0, atol=5e-6, msg=name)


@pytest.mark.parametrize("index", range(len(LONG)))
def test_200_steps_of_two_processes_are_those_of_pytorch(index: int, results: Any) -> None:
    expect_as_in_pytorch(LONG[index], results[len(SETTINGS) + index]["ranks"])


@pytest.mark.parametrize("index", [i for i, row in enumerate(SETTINGS) if row["zero"]])
def test_with_zero_each_process_has_moments_of_its_share(index: int, results: Any) -> None:
    shares = []
    for rank in results[index]["ranks"]:
        state = rank["state"]
        if SETTINGS[index]["generation"] == 1:
            marked = [name for name in state if name.startswith("Moment_1_")]
            shares.append({name.removeprefix("Moment_1_") for name in marked})
        else:
            shares.append(set(state["optimizer"]) - {"shared_optimizer_state"})
    assert shares[0].isdisjoint(shares[1])
    assert shares[0] | shares[1] == {n for n, _ in models.classifier().named_parameters()}
    assert all(shares)


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_one_process_goes_on_from_the_checkpoint_of_two(
    index: int, results: Any, folder: Path
) -> None:
    settings = SETTINGS[index]
    where = folder / settings["folder"]
    files = sorted(path.name for path in where.iterdir())
    named = [f"ORT_checkpoint.ZeRO.{rank}.1.ort.pt" for rank in range(2)]
    assert files == (named if settings["zero"] else ["ORT_checkpoint.ort.pt"])
    plain, ours = models.classifier(), models.classifier()
    optimizer = models.plain_optimizer(settings["name"], plain)
    data = [*models.batches(process.STEPS + 8)]
    rest = data[process.STEPS :]
    models.train_plain(plain, optimizer, data, settings["accumulation"], lambda _: models.RATE)
    trainer = models.of_first(
        ours,
        settings["name"],
        lambda weight: {"lambda": 0.01 if models.decays(weight) else 0.0},
        gradient_accumulation_steps=settings["accumulation"],
    )
    first.load_checkpoint(trainer, where, strict=True)
    for x, y in rest:
        trainer.train_step(x, y, models.RATE)
    for name, parameter in plain.named_parameters():
        other = dict(ours.named_parameters())[name]
        torch.testing.assert_close(other, parameter, rtol=0, atol=5e-6, msg=name)


def test_a_layer_that_one_process_reaches_is_trained_in_both(results: Any) -> None:
    one, other = (rank["weights"] for rank in results[-1]["ranks"])
    before = dict(models.classifier(process.Branching).named_parameters())
    assert all(torch.equal(one[name], other[name]) for name in before)
    moved = {name for name in before if not torch.equal(one[name], before[name])}
    assert moved == {name for name in before if not name.startswith("none")}


def test_a_checkpoint_of_some_processes_is_refused(
    results: Any, folder: Path, tmp_path: Path
) -> None:
    source = folder / "checkpoint-3" / "ORT_checkpoint.ZeRO.1.1.ort.pt"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    trainer = models.of_first(models.classifier(), "LambOptimizer")
    with pytest.raises(InputError, match="written by 2 processes"):
        first.load_checkpoint(trainer, tmp_path)


def test_files_of_several_runs_are_not_mixed(results: Any, folder: Path, tmp_path: Path) -> None:
    trainer = models.of_first(models.classifier(), "LambOptimizer")
    content = (folder / "checkpoint-3" / "ORT_checkpoint.ZeRO.1.1.ort.pt").read_bytes()
    for name in ("ZeRO.0.1", "ZeRO.1.1", "ZeRO.0.2", "ZeRO.1.2", "ZeRO.2.2"):
        (tmp_path / f"ORT_checkpoint.{name}.ort.pt").write_bytes(content)
    with pytest.raises(InputError, match="one and the same run"):
        first.load_checkpoint(trainer, tmp_path)
    (tmp_path / "ORT_checkpoint.ort.pt").write_bytes(content)
    with pytest.raises(InputError, match="leave one of them"):
        first.load_checkpoint(trainer, tmp_path)


# -- who is who ------------------------------------------------------------------------------------


def variables(launcher: str, values: tuple[int, int, int, int]) -> dict[str, str]:
    names = [group[0] for group in ranks.LAUNCHERS[launcher]]
    return {name: str(value) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("launcher", ranks.LAUNCHERS)
def test_each_launcher_is_known_by_its_variables(launcher: str) -> None:
    found = ranks.place(variables(launcher, (5, 6, 1, 2)))
    assert found == ranks.Place(5, 6, 1, 2, launcher)
    assert ranks.place({}) == ranks.Place()


def test_the_innermost_launcher_counts() -> None:
    within = variables("Slurm", (1, 2, 0, 1)) | variables("torchrun", (5, 8, 1, 4))
    assert ranks.place(within) == ranks.Place(5, 8, 1, 4, "torchrun")


def test_slurm_tells_the_local_rank_where_pmi_does_not() -> None:
    given = {"PMI_RANK": "3", "PMI_SIZE": "4"}
    given |= {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert ranks.place(given) == ranks.Place(3, 4, 1, 2, "MPICH")


def test_slurm_counts_the_tasks_of_the_step_and_reads_its_lists() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}
    assert ranks.place(batch)[:2] == (0, 1)
    step = {"SLURM_PROCID": "3", "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert ranks.place(step)[:4] == (3, 5, 1, 2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK='two'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "below the number"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_RANK": "0", "PMI_SIZE": "-1"}, "PMI_SIZE='-1'"),
    ],
)
def test_variables_that_contradict_each_other_are_told(given: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        ranks.place(given)


@pytest.mark.parametrize(
    ("rank", "world", "told"),
    [(0, 2, "joined no group"), (2, 2, "below the size"), (1, 1, "below")],
)
def test_a_world_that_is_not_there_is_refused(rank: int, world: int, told: str) -> None:
    before = {n: p.clone() for n, p in models.classifier().named_parameters()}
    model = models.classifier()
    with pytest.raises(InputError, match=told):
        models.of_first(model, world_rank=rank, world_size=world, frozen_weights=["hidden.bias"])
    with pytest.raises(InputError, match=told):
        models.second(model, distributed={"world_rank": rank, "world_size": world})
    assert all(p.requires_grad and torch.equal(p, before[n]) for n, p in model.named_parameters())
