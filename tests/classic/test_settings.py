"""Options, optimizers, schedules and scalers: what they hold, and what is told of a wrong one."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from ortrain import Options
from ortrain.classic import ORTTrainer, ORTTrainerOptions, TrainStepInfo, amp, first, optim
from ortrain.classic.orttrainer_options import SCHEMA, Setting
from ortrain.classic.updates import ATTRIBUTES
from ortrain.errors import InputError, OrtrainError, OrtrainWarning
from tests.classic import models


def settings(
    schema: Any = SCHEMA, where: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], Any]]:
    """All settings with the way to them."""
    found = []
    for name, entry in schema.items():
        if isinstance(entry, Setting):
            found.append(((*where, name), entry))
        else:
            found += settings(entry, (*where, name))
    return found


ALL = settings()
NAMES = [".".join(way) for way, _ in ALL]


def nest(way: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {way[0]: nest(way[1:], value) if len(way) > 1 else value}


def at(options: ORTTrainerOptions, way: tuple[str, ...]) -> Any:
    found: Any = options
    for name in way:
        found = getattr(found, name)
    return found


def another(entry: Setting) -> Any:
    """A value that is not the default."""
    if entry.default is False or entry.default is True:
        return not entry.default
    if isinstance(entry.default, int):
        return entry.default + 1
    if isinstance(entry.default, str):
        return "other"
    return {list: ["a"], dict: {"a": 1}}.get(type(entry.default), 13)


@pytest.mark.parametrize(("way", "entry"), ALL, ids=NAMES)
def test_every_setting_has_its_default_and_takes_a_value(
    way: tuple[str, ...], entry: Setting
) -> None:
    assert at(ORTTrainerOptions(), way) == entry.default
    special = {
        "lr_scheduler": optim.lr_scheduler.ConstantWarmupLRScheduler(10),
        "loss_scaler": amp.DynamicLossScaler(),
        "ortrain": Options(),
        "extra_postprocess": print,
    }
    value = special.get(way[-1], another(entry))
    options = ORTTrainerOptions(nest(way, value))
    assert at(options, way) == value
    assert way[-1] in repr(options)
    assert [name for name, _ in options.unused()] == ([".".join(way)] if entry.unused else [])
    for other, _ in ALL:
        if other != way:
            assert at(options, other) == at(ORTTrainerOptions(), other)


@pytest.mark.parametrize(("way", "entry"), ALL, ids=NAMES)
def test_a_value_of_another_type_is_told_by_its_full_name(
    way: tuple[str, ...], entry: Setting
) -> None:
    if entry.kinds is object and way[-1] != "extra_postprocess":
        pytest.skip("takes anything")
    with pytest.raises(TypeError, match=".".join(way)):
        ORTTrainerOptions(nest(way, 1.5))


@pytest.mark.parametrize(
    ("way", "entry"), [row for row in ALL if row[1].low is not None], ids=lambda v: str(v)[:20]
)
def test_a_value_out_of_its_range_is_told(way: tuple[str, ...], entry: Setting) -> None:
    assert entry.low is not None
    for value in [entry.low - 1, *([entry.high + 1] if entry.high is not None else [])]:
        with pytest.raises(InputError, match=".".join(way)):
            ORTTrainerOptions(nest(way, value))


@pytest.mark.parametrize("way", [way for way, _ in ALL], ids=NAMES)
def test_an_unknown_name_is_told_with_near_ones(way: tuple[str, ...]) -> None:
    wrong = (*way[:-1], f"{way[-1]}_")
    with pytest.raises(InputError, match=rf"{'.'.join(wrong)}[\s\S]*'{way[-1]}'"):
        ORTTrainerOptions(nest(wrong, 1))


def test_the_pipelines_settings_are_found_where_they_stood_first() -> None:
    for name, value in (("pipeline_parallel_size", 2), ("sliced_tensor_names", ["a"])):
        options = ORTTrainerOptions({"distributed": {name: value, "world_size": 1}})
        assert getattr(options.distributed.pipeline_parallel, name) == value


def test_options_are_no_part_of_what_they_were_made_of() -> None:
    frozen = ["hidden.bias"]
    one = ORTTrainerOptions({"utils": {"frozen_weights": frozen}})
    one.utils.frozen_weights.append("other")
    assert frozen == ["hidden.bias"]
    assert ORTTrainerOptions().utils.frozen_weights == []


UNUSED = [(way, entry) for way, entry in ALL if entry.unused]


@pytest.mark.parametrize(("way", "entry"), UNUSED, ids=[".".join(way) for way, _ in UNUSED])
def test_a_setting_that_changes_nothing_says_so_once(way: tuple[str, ...], entry: Setting) -> None:
    with pytest.warns(OrtrainWarning, match=f"{'.'.join(way)} changes nothing") as told:
        trainer = models.second(models.classifier(), **nest(way, another(entry)))
    assert len(told) == 1
    trainer.train_step(*next(models.batches(1)))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"distributed": {"horizontal_parallel_size": 2}}, "horizontal_parallel_size is 2"),
        ({"distributed": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2"),
        ({"distributed": {"enable_adasum": True}}, "enable_adasum"),
        ({"distributed": {"data_parallel_size": 2}}, "data_parallel_size is 2"),
        ({"mixed_precision": {"loss_scaler": amp.DynamicLossScaler()}}, "without mixed precision"),
        ({"utils": {"frozen_weights": ["hidden.wait"]}}, r"hidden.wait[\s\S]*'hidden.weight'"),
        (
            {"utils": {"frozen_weights": [n for n, _ in models.Classifier().named_parameters()]}},
            "no parameter",
        ),
        ({"device": {"id": "cuda"}}, "no CUDA device"),
        ({"device": {"id": "gpu"}}, "device 'gpu'"),
    ],
)
def test_what_is_not_served_is_refused_before_anything_changes(given: Any, told: str) -> None:
    if "CUDA" in told and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    model = models.classifier()
    with pytest.raises(InputError, match=told):
        models.second(model, **given)
    assert all(p.requires_grad for p in model.parameters())


def test_old_opsets_and_limits_of_memory_are_told() -> None:
    with pytest.warns(OrtrainWarning, match="opset 18"):
        models.second(models.classifier(), _internal_use={"onnx_opset_version": 12})
    with pytest.warns(OrtrainWarning, match="mem_limit"):
        models.second(models.classifier(), device={"id": "cpu", "mem_limit": 1 << 30})
    with pytest.warns(OrtrainWarning) as told:
        models.of_first(
            models.classifier(),
            _opset_version=10,
            _enable_internal_postprocess=False,
            run_symbolic_shape_infer=True,
            optimized_model_filepath="model.onnx",
        )
    assert len(told) == 4


# -- optimizers ------------------------------------------------------------------------------------

CONFIGS = {"AdamOptimizer": optim.AdamConfig, "LambOptimizer": optim.LambConfig}


@pytest.mark.parametrize("name", CONFIGS)
def test_groups_have_the_defaults_but_for_what_they_say(name: str) -> None:
    kind = CONFIGS[name]
    group = {"params": ["hidden.bias", "output.bias"], "alpha": 0.5, "lambda_coef": 0.1}
    config = kind([group], lr=0.1, beta=0.9)
    assert set(config.defaults) == {"lr", "lambda_coef", *ATTRIBUTES[name]} - {"lambda"}
    own, others = config.attributes_of("hidden.bias"), config.attributes_of("hidden.weight")
    assert own == {**others, "alpha": 0.5, "lambda_coef": 0.1}
    assert others["beta"] == 0.9
    assert config.params[0]["beta"] == 0.9
    assert (config.lr, config.alpha, config.beta) == (0.1, 0.9, 0.9)
    optimizer = models.second(models.classifier(), config)._training.stepper.update.optimizer
    found = [(g["betas"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert sorted(found) == [((0.5, 0.9), 0.1, 2), ((0.9, 0.9), 0.0, 4)]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: optim.AdamConfig(lr=-1), "lr=-1"),
        (lambda: optim.AdamConfig([{"params": ["a"], "lr": 1.0}]), "learning rate of its own"),
        (lambda: optim.AdamConfig([{"params": ["a"], "alfa": 1.0}]), r"'alfa'[\s\S]*'alpha'"),
        (lambda: optim.AdamConfig([{"alpha": 1.0}]), "names no parameters"),
        (
            lambda: optim.LambConfig([{"params": ["a"], "alpha": 1.0}, {"params": ["b", "a"]}]),
            "'a' stands in two",
        ),
        (lambda: optim.SGDConfig([{"params": ["a"]}]), "not empty"),
        (lambda: optim.AdamConfig(weight_decay_mode=2), "weight_decay_mode=2"),
        (lambda: optim.LambConfig(epsilon=-1.0), "epsilon=-1.0"),
        (lambda: optim._OptimizerConfig("AdamOptimiser", [], {"lr": 1}), "'AdamOptimizer'"),
        (lambda: optim._OptimizerConfig("AdamOptimizer", [], {}), "no 'lr'"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_told(make: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_by_weight_are_those_of_the_operator(name: str) -> None:
    asked: list[str] = []

    def attributes(weight: str) -> dict[str, float]:
        asked.append(weight)
        return dict(ATTRIBUTES[name])

    model = models.classifier()
    models.of_first(model, name, attributes)
    assert asked == [n for n, _ in model.named_parameters()]
    for attribute in ATTRIBUTES[name]:
        with pytest.raises(InputError, match=rf"'hidden.weight'[\s\S]*'{attribute}'"):
            models.of_first(models.classifier(), name, lambda _, a=attribute: {f"{a}_": 1.0})
        with pytest.raises((InputError, TypeError), match=attribute):
            models.of_first(models.classifier(), name, lambda _, a=attribute: {a: "much"})
    with pytest.raises(InputError, match="lern"):
        models.of_first(models.classifier(), name, lambda _: {"lern": 0.1})


def test_an_unknown_optimizer_is_told_with_near_ones() -> None:
    with pytest.raises(InputError, match=r"'AdamW'[\s\S]*AdamOptimizer"):
        models.of_first(models.classifier(), "AdamW")


def test_weights_that_decay_in_two_modes_are_refused() -> None:
    with pytest.raises(InputError, match="weight_decay_mode differs"):
        models.of_first(
            models.classifier(), attributes=lambda name: {"weight_decay_mode": int("bias" in name)}
        )


def test_a_group_of_parameters_that_are_not_there_is_told() -> None:
    config = optim.AdamConfig([{"params": ["hidden.wait"], "alpha": 0.5}])
    with pytest.raises(InputError, match=r"hidden.wait"):
        models.second(models.classifier(), config)


# -- schedules -------------------------------------------------------------------------------------

SCHEDULES = {
    "ConstantWarmupLRScheduler": lambda x: 1.0,
    "CosineWarmupLRScheduler": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "LinearWarmupLRScheduler": lambda x: 1 - x,
    "PolyWarmupLRScheduler": lambda x: ((0.2 - 1e-7) * (1 - x) + 1e-7) / 0.2,
}


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.35])
@pytest.mark.parametrize("total", [1, 10, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_warms_up_and_then_goes_its_way(name: str, total: int, warmup: float) -> None:
    schedule = getattr(optim.lr_scheduler, name)(total, warmup=warmup)
    first_steps = warmup * total
    for step in range(total):
        info: Any = SimpleNamespace(
            optimization_step=step, optimizer_config=SimpleNamespace(lr=0.2)
        )
        if step < first_steps:
            share = step / max(1, first_steps)
        else:
            share = SCHEDULES[name]((step - first_steps) / max(1, total - first_steps))
        assert schedule._step(info) == pytest.approx([0.2 * share], abs=1e-12)
        assert schedule.get_last_lr() == schedule.get_lr(info)
    info.optimization_step = total + 1
    ends = {"Co": 0.2, "Li": 0.0, "Po": 1e-7, "Cosine": None}
    if name[:6] != "Cosine":
        assert schedule.get_lr(info) == pytest.approx([ends[name[:2]]])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"total_steps": 0}, "total_steps=0"),
        ({"total_steps": 10, "warmup": 1.0}, "warmup=1.0"),
        ({"total_steps": 1000, "warmup": 100}, "write warmup=0.1 for 100 steps"),
        ({"total_steps": 10, "warmup": -0.1}, "warmup=-0.1"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_told(name: str, args: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        getattr(optim.lr_scheduler, name)(**args)


def test_the_end_of_a_polynomial_has_to_be_below_its_beginning() -> None:
    schedule = optim.lr_scheduler.PolyWarmupLRScheduler(10, lr_end=0.5)
    info = TrainStepInfo(optim.SGDConfig(lr=0.1))
    with pytest.raises(InputError, match=r"lr_end=0.5 .* 0.1"):
        schedule.get_lr(info)
    with pytest.raises(InputError, match="power=-1"):
        optim.lr_scheduler.PolyWarmupLRScheduler(10, power=-1.0)
    with pytest.raises(InputError, match="cycles=0"):
        optim.lr_scheduler.CosineWarmupLRScheduler(10, cycles=0.0)


# -- what a step is told of ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer_config": -1}, "optimizer_config=-1: expected an optim.AdamConfig"),
        ({"all_finite": -1}, "all_finite=-1: expected True or False"),
        ({"all_finite": "yes"}, "all_finite='yes'"),
        ({"fetches": "loss"}, r"write fetches=\['loss'\]"),
        ({"fetches": -1}, "fetches=-1: expected a list of names"),
        ({"optimization_step": "3"}, "optimization_step='3': expected a whole number"),
        ({"step": 1.5}, "step=1.5: expected a whole number"),
    ],
)
def test_the_state_of_a_step_of_another_type_is_refused(given: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        TrainStepInfo(**{"optimizer_config": optim.LambConfig(), **given})


@pytest.mark.parametrize("name", ["optimization_step", "step"])
def test_a_step_below_zero_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}=-1: expected 0 or more"):
        TrainStepInfo(optim.LambConfig(), **{name: -1})


# -- scalers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_scale_is_doubled_and_halved_within_its_bounds(window: int, generation: int) -> None:
    bounds: dict[str, Any] = {"min_loss_scale": 2.0, "max_loss_scale": 32.0}
    one = amp.DynamicLossScaler(True, 8.0, window, **bounds)
    other = first.LossScaler("scale", True, 8.0, window, **bounds)
    generator, scale, good = torch.Generator().manual_seed(window), 8.0, 0
    for _ in range(200):
        finite = bool(torch.rand((), generator=generator) > 0.3)
        good = good + 1 if finite else 0
        if not finite:
            scale = max(2.0, scale / 2)
        elif good == window:
            scale, good = min(32.0, scale * 2), 0
        if generation == 2:
            assert one.update(SimpleNamespace(all_finite=finite)) == one.loss_scale == scale
        else:
            other.update_loss_scale(torch.tensor([finite]))
            assert other.loss_scale_ == scale
    one.reset()
    other.reset()
    assert (one.loss_scale, other.loss_scale_) == (8.0, 8.0)


def test_a_static_scale_stays() -> None:
    fixed = amp.LossScaler(8.0)
    assert fixed.update(SimpleNamespace(all_finite=False)) == 8.0
    scaler = first.LossScaler("scale", False, 8.0)
    scaler.update_loss_scale(False)
    assert scaler.loss_scale_ == 8.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: amp.LossScaler(0.0),
        lambda: amp.DynamicLossScaler(loss_scale=math.inf),
        lambda: amp.DynamicLossScaler(up_scale_window=0),
        lambda: amp.DynamicLossScaler(min_loss_scale=4.0, max_loss_scale=2.0),
        lambda: first.LossScaler("scale", True, loss_scale=-1.0),
    ],
)
def test_what_is_wrong_with_a_scaler_is_told(make: Any) -> None:
    with pytest.raises(InputError):
        make()


# -- descriptions ----------------------------------------------------------------------------------

X, Y = ("x", ["n", 6]), ("y", ["n"])
LOSS, LOGITS = ("loss", [], True), ("logits", ["n", 4])


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        ([X, Y], [("loss", []), LOGITS], "has 0 losses"),
        ([X, Y], [LOSS, ("logits", ["n", 4], True)], "has 2 losses: 'loss', 'logits'"),
        ([X, Y], [LOGITS, LOSS], "behind other outputs"),
        ([X, Y], [("loss", ["n"], True)], r"shape \['n'\]"),
        ([X, X, Y], [LOSS], "input 'x' is described twice"),
        ([X, Y], [LOSS, LOGITS, LOGITS], "output 'logits' is described twice"),
        ([], [LOSS], "no input"),
        ([Y], [LOSS], "needs a label"),
        ([("z", ["n", 6]), Y], [LOSS], r"has no input 'z'[\s\S]*takes x"),
        ([("xx", ["n", 6]), Y], [LOSS], "did you mean 'x'"),
        ([X, ("z", ["n"]), Y], [LOSS], "has no input 'z'"),
        ([("x", [-1, 6]), Y], [LOSS], "size -1"),
        ([("x", [2.5]), Y], [LOSS], "size 2.5"),
        ([("x", ["n", ""]), Y], [LOSS], "size ''"),
        ([("", ["n"]), Y], [LOSS], "without a name"),
        ([("x",), Y], [LOSS], r"expected \(name, shape\)"),
        ([X, Y], [("loss", [], True, 1)], "is_loss"),
    ],
)
def test_a_description_that_is_not_the_models_is_told(inputs: Any, outputs: Any, told: str) -> None:
    description = {"inputs": inputs, "outputs": outputs}
    with pytest.raises(InputError, match=told):
        models.second(models.classifier(), description=description)


@pytest.mark.parametrize("keys", [["inputs"], ["outputs"], ["inputs", "outputs", "loss"]])
def test_a_description_has_inputs_and_outputs_and_nothing_else(keys: list[str]) -> None:
    description = {key: [LOSS] if key == "outputs" else [X, Y] for key in keys}
    with pytest.raises(InputError, match="exactly"):
        models.second(models.classifier(), description=description)


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        ((5, 5), (5,), r"input 'x' has the shape \[5, 5\]"),
        ((5, 6), (4,), r"input 'y' has the shape \[4\][\s\S]*'n': 5"),
        ((5,), (5,), r"input 'x' has the shape \[5\]"),
        ((5, 6, 1), (5,), r"input 'x' has the shape \[5, 6, 1\]"),
    ],
)
def test_inputs_of_another_shape_are_told(x: Any, y: Any, told: str) -> None:
    description = {"inputs": [X, Y], "outputs": [LOSS]}
    trainer = models.second(models.classifier(), description=description)
    with pytest.raises(InputError, match=told):
        trainer.train_step(torch.zeros(x), torch.zeros(y, dtype=torch.int64))


def test_whole_numbers_of_other_dimensions_are_taken_as_they_come() -> None:
    # The BERT example describes its labels of sentences as [batch, 2], and passes [batch].
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = models.classifier()

        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.inside(x), label)

    description = {"inputs": [X, ("label", ["n", 2])], "outputs": [LOSS]}
    trainer = models.second(Tagger(), description=description, loss_fn=None)
    x, label = torch.randn(5, 6), torch.randint(0, 4, (5,))
    with pytest.warns(OrtrainWarning, match=r"input 'label' has the shape \[5\].*\['n', 2\]"):
        trainer.train_step(x, label)
    with pytest.raises(InputError, match="input 'label' has the shape"):
        trainer.train_step(x, torch.zeros(5, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ([LOSS, LOGITS, ("more", ["n"])], "returns 2 tensors, and 3 outputs"),
        ([LOSS, ("logits", ["n", 5])], r"output 'logits' has the shape \[8, 4\]"),
        ([LOSS, ("logits", [7, 4])], r"output 'logits'"),
        ([LOSS, ("logits", ["n"])], r"output 'logits'"),
    ],
)
def test_outputs_of_another_shape_or_number_are_told_before_anything_changes(
    outputs: Any, told: str
) -> None:
    model = models.classifier()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = models.second(model, description={"inputs": [X, Y], "outputs": outputs})
    with pytest.raises(InputError, match=told):
        trainer.train_step(*next(models.batches(1)))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((), {}, "not given x, y"),
        ((1,), {}, "not given y"),
        ((1, 2, 3), {}, "given 3 arguments"),
        ((1, 2), {"y": 3}, "'y' by position and by name"),
        ((1, 2), {"z": 3}, "'z', which is not described"),
        ((), {"y": 2}, "not given x"),
        ((1, 2), {}, "input 'x' is a int"),
    ],
)
def test_arguments_that_are_not_the_described_inputs_are_told(
    args: Any, kwargs: Any, told: str
) -> None:
    trainer = models.second(models.classifier())
    with pytest.raises(InputError, match=told):
        trainer.train_step(*args, **kwargs)


def test_the_first_generation_takes_the_learning_rate_behind_the_inputs() -> None:
    trainer = models.of_first(models.classifier())
    x, y = next(models.batches(1))
    with pytest.raises(InputError, match="not given Learning_Rate"):
        trainer.train_step(x, y)
    with pytest.raises(InputError, match=r"shape \[2\]"):
        trainer.train_step(x, y, torch.ones(2))
    for rate in (0.1, torch.tensor(0.1), torch.tensor([0.1])):
        trainer.train_step(x, y, Learning_Rate=rate)
    assert trainer.global_step_ == 3


def test_what_an_example_of_2020_describes_wrongly_is_told_once_and_taken_as_it_comes() -> None:
    io = first.IODescription
    described = first.ModelDescription(
        [io("src", [7, 3], torch.float32), io("label", [7, 3, 5], torch.int32)],
        [io("loss", [], torch.float32), io("output", [7, 3, 5], torch.float32)],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    plain = copy.deepcopy(model)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.view(-1, 5), target)

    rate = io("Learning_Rate", [0.1], torch.float32)  # type: ignore[list-item]
    trainer = first.ORTTrainer(
        model, loss_fn, described, "SGDOptimizer", None, rate, "cpu", options=models.GRAPH
    )
    data = torch.randint(0, 5, (4, 7, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.eval_step(data[0])
        losses = [trainer.train_step(x, x.view(-1), torch.tensor([0.1]))[0].item() for x in data]
    told = [str(w.message) for w in caught if w.category is OrtrainWarning]
    assert [line.partition(": ")[0] for line in told] == [
        "the input 'src' is torch.int64, and described as torch.float32",
        "the input 'label' is torch.int64, and described as torch.int32",
        "the label 'label' has the shape [21], and is described as [7, 3, 5]",
    ]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, loss in zip(data, losses, strict=True):
        optimizer.zero_grad()
        expected = loss_fn(plain(x), x.view(-1))
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(InputError, match=r"input 'src' has the shape \[6, 3\]"):
        trainer.train_step(data[0, :6], data[0, :6].reshape(-1), 0.1)


def test_a_label_described_wrongly_has_its_own_sizes_in_the_file(tmp_path: Path) -> None:
    description = {
        "inputs": [("x", [8, 6]), ("y", [8, 1, 4])],
        "outputs": [LOSS, ("logits", [8, 4])],
    }
    trainer = models.second(models.classifier(), description=description)
    with pytest.warns(OrtrainWarning, match=r"the label 'y' has the shape \[8\]"):
        trainer.train_step(*next(models.batches(1)))
    trainer.save_as_onnx(tmp_path / "model.onnx")
    inputs = {value.name: value for value in onnx.load(tmp_path / "model.onnx").graph.input}
    assert len(inputs["y"].type.tensor_type.shape.dim) == 1
    assert [dim.dim_value for dim in inputs["x"].type.tensor_type.shape.dim] == [8, 6]


def test_the_first_generation_may_compute_the_learning_rate_itself() -> None:
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(step)
        return 0.1

    trainer = models.of_first(
        models.classifier(), get_lr_this_step=rate, global_step=5, gradient_accumulation_steps=2
    )
    for x, y in models.batches(4):
        trainer.train_step(x, y)
    assert seen == [5, 5, 6, 6]
    trainer.eval()
    assert len(trainer(x, y)) == 2
    assert trainer.global_step_ == 7


def test_names_of_the_first_generation_need_not_be_those_of_forward() -> None:
    io = first.IODescription
    described = first.ModelDescription(
        [io("picture", [8, 6]), io("class", [8])], [io("loss", []), io("logits", [8, 4])]
    )
    rate = io("rate", [1], torch.float32)
    function, args = nn.functional.cross_entropy, ("SGDOptimizer", None, rate, "cpu")
    trainer = first.ORTTrainer(
        models.classifier(), function, described, *args, options=models.GRAPH
    )
    x, y = next(models.batches(1))
    assert trainer.train_step(picture=x, rate=0.1, **{"class": y})[0].shape == ()
    for inputs in (described.inputs_[:1], [*described.inputs_, io("more", [8])]):
        wrong = first.ModelDescription(inputs, described.outputs_)
        with pytest.raises(InputError):
            first.ORTTrainer(models.classifier(), function, wrong, *args)
    clash = first.ModelDescription([io("rate", [8, 6]), io("y", [8])], described.outputs_)
    with pytest.raises(InputError, match="'rate'"):
        first.ORTTrainer(models.classifier(), function, clash, *args)


def test_a_model_whose_result_has_names_is_read_by_them() -> None:
    class Named(models.Classifier):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return {"logits": logits, "loss": nn.functional.cross_entropy(logits, y), "note": "a"}

    description = {"inputs": [X, Y], "outputs": [LOSS, LOGITS]}
    trainer = models.second(models.classifier(Named), description=description, loss_fn=None)
    loss, logits = trainer.train_step(*next(models.batches(1)))
    assert (loss.shape, logits.shape) == ((), (8, 4))


def test_a_loss_that_depends_on_nothing_that_is_trained_is_told() -> None:
    trainer = models.second(
        models.classifier(), loss_fn=lambda prediction, label: prediction.detach().sum()
    )
    with pytest.raises((InputError, OrtrainError), match="does not depend"):
        trainer.train_step(*next(models.batches(1)))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: ORTTrainer(models.Classifier(), models.DESCRIPTION, torch.optim.SGD),
            "optim_config",
        ),  # type: ignore[arg-type]
        (lambda: models.second(models.Classifier(), loss_fn=3), "loss_fn"),
        (lambda: models.second(lambda x: x), "function"),  # type: ignore[arg-type]
        (lambda: ORTTrainerOptions([1]), "options"),  # type: ignore[arg-type]
        (
            lambda: models.of_first(models.Classifier(), gradient_accumulation_steps=0),
            "accumulation",
        ),
        (lambda: models.of_first(models.Classifier(), enable_adasum=True), "adasum"),
        (lambda: models.of_first(models.Classifier(), deepspeed_zero_stage=2), "stage 2"),
        (
            lambda: models.of_first(
                models.Classifier(), loss_scaler=first.LossScaler("scale", True)
            ),
            "without mixed precision",
        ),
    ],
)
def test_arguments_of_another_kind_are_told(make: Any, told: str) -> None:
    with pytest.raises((TypeError, InputError), match=told), warnings.catch_warnings():
        make()
