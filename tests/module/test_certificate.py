"""A graph is compared with PyTorch before it is used, and nobody notices."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.autodiff import registry
from ortrain.errors import OrtrainWarning, ParityError
from ortrain.frontend import proof
from ortrain.frontend.backend import _KNOWN
from ortrain.frontend.graph import Graph
from ortrain.runtime.aten import table
from ortrain.step import agreement
from ortrain.step.digest import Digest
from ortrain.step.evidence import Evidence
from tests.module.agreement import GRAPH

FALLBACK = replace(GRAPH, fallback="torch")


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> None:
    """Modules share graphs that are equal, and one that was compared before is not again."""
    _KNOWN.clear()


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 4)))


def two_layers(between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 2))


def with_rule(monkeypatch: pytest.MonkeyPatch, operator: str, factor: float) -> None:
    """Makes a gradient rule wrong by a factor."""
    key = registry._key(operator)
    own = registry._ENTRIES[key]
    assert own.rule is not None

    @functools.wraps(own.rule)
    def wrong(g: Any, *args: Any, **kwargs: Any) -> Any:
        return own.rule(g, *args, **kwargs) * factor

    monkeypatch.setitem(registry._ENTRIES, key, replace(own, rule=wrong))


# -- what it finds -------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.001, 0.999, -1.0])
def test_a_wrong_gradient_rule_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    with_rule(monkeypatch, "Tanh", factor)
    model = ORTModule(two_layers(nn.Tanh()), options=GRAPH)
    with pytest.raises(ParityError, match=r"gradient 0\.(weight|bias) differs"):
        model(rows())


class Normalized(nn.Module):
    """Its loss, and the mean that its buffer follows, are zero but for roundings."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(2))
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        first, second = self.norms
        return second(self.layer(first(value))).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.2, 0.8, -1.0])
def test_a_wrong_gradient_rule_is_found_in_sixteen_bits(
    monkeypatch: pytest.MonkeyPatch, factor: float, dtype: torch.dtype
) -> None:
    with_rule(monkeypatch, "Tanh", factor)
    model = ORTModule(two_layers(nn.Tanh()), options=replace(GRAPH, engine="aten"))
    with (
        torch.autocast("cpu", dtype),
        pytest.raises(ParityError, match=r"gradient 0\.(weight|bias) differs"),
    ):
        model(rows(64, 4))


class Tipping:
    """Runs of two engines, in some of which a number has tipped at a bend.

    Attributes:
        module: with no parameters.
        precision: that they compute in.
    """

    module = nn.Identity()

    def __init__(
        self,
        seed: int,
        eager: set[int],
        graph: set[int],
        precision: torch.dtype = torch.float16,
    ) -> None:
        self.precision, self.directions = precision, agreement.TOLERANCES[precision].directions
        self.exact = torch.randn(200, generator=torch.Generator().manual_seed(seed))
        self.tipped = torch.randn(200, generator=torch.Generator().manual_seed(seed + 1)) / 5
        self.seed, self.tips = seed, {"eager": eager, "graph": graph}

    def evidence(self, engine: str, run: int) -> Any:
        """Of a run; the call's own is the one of number 0."""
        number = self.seed * 100 + 10 * (engine == "graph") + run
        noise = torch.randn(200, generator=torch.Generator().manual_seed(number))
        noise *= torch.finfo(self.precision).eps
        gradient = self.exact + noise + self.tipped * (run in self.tips[engine])
        return Evidence(gradients={"w": Digest.of(gradient, self.directions)})

    def eager(self, rounding: int = 0) -> Any:
        return self.evidence("eager", rounding)

    def typical(self) -> float:
        return 1.0

    def faults(self, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
        """What a certificate of these runs finds."""
        truth = Evidence(gradients={"w": Digest.of(self.exact, self.directions)})
        monkeypatch.setattr(agreement, "_in_truth", lambda _: truth)
        run = functools.partial(self.evidence, "graph")
        return agreement.compare(self.eager(), run(0), self, run).faults  # type: ignore[arg-type]


PRECISIONS = pytest.mark.parametrize("precision", [torch.float16, torch.float32], ids=str)


@PRECISIONS
@pytest.mark.parametrize("seed", range(10))
def test_what_is_wrong_in_most_roundings_is_found(
    monkeypatch: pytest.MonkeyPatch, seed: int, precision: torch.dtype
) -> None:
    count = agreement.TOLERANCES[precision].roundings
    for tips in itertools.product((False, True), repeat=count):
        graph = {0} | {k for k, tipped in enumerate(tips, 1) if tipped}
        faults = Tipping(seed, set(), graph, precision).faults(monkeypatch)
        assert bool(faults) == (2 * sum(tips) > count), graph


@PRECISIONS
@pytest.mark.parametrize("run", range(1, agreement.TOLERANCES[torch.float16].roundings + 1))
def test_what_tips_in_pytorch_too_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, run: int, precision: torch.dtype
) -> None:
    for seed in range(4):
        assert not Tipping(seed, {run}, {*range(5)}, precision).faults(monkeypatch)


@pytest.mark.parametrize(
    ("beside", "apart", "wrong"),
    [
        ("running_var", 2e-8, False),
        ("running_var", 1e-6, True),
        ("running_median", 2e-8, True),
    ],
)
def test_a_running_mean_near_zero_has_the_digits_of_its_deviation(
    monkeypatch: pytest.MonkeyPatch, beside: str, apart: float, wrong: bool
) -> None:
    mean, deviation = torch.linspace(1, 2, 16) * 2e-5, torch.linspace(0.8, 1.2, 16)

    def run(apart: float) -> Evidence:
        buffers = {"norm.running_mean": mean + apart, f"norm.{beside}": deviation}
        return Evidence(buffers={name: Digest.of(value) for name, value in buffers.items()})

    monkeypatch.setattr(agreement, "_in_truth", lambda _: run(0.0))
    trial: Any = SimpleNamespace(
        precision=torch.float32, typical=lambda: 1.0, eager=lambda rounding: run(1e-9)
    )
    faults = agreement.compare(run(1e-9), run(apart), trial, lambda _: run(apart)).faults
    assert [fault.partition(" by ")[0] for fault in faults] == [
        "buffer norm.running_mean differs"
    ] * wrong


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_no_matter_of_rounding(
    monkeypatch: pytest.MonkeyPatch, special: float
) -> None:
    """Not where the other roundings have none, either."""
    runs = Tipping(0, set(), set())
    own = runs.evidence

    def evidence(engine: str, run: int) -> Any:
        if (engine, run) != ("graph", 0):
            return own(engine, run)
        gradient = torch.where(torch.arange(200) == 7, special, runs.exact)
        return Evidence(gradients={"w": Digest.of(gradient, 32)})

    monkeypatch.setattr(runs, "evidence", evidence)
    assert runs.faults(monkeypatch) == ("gradient w has NaN or infinities in other places",)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_zero_but_for_roundings_agrees(seed: int) -> None:
    torch.manual_seed(seed)
    model = ORTModule(Normalized(), options=GRAPH)
    model(torch.randn(300, 64) * 10 + 3).backward()
    shown = model.report.certificate
    assert "inf" not in shown
    assert "e+" not in shown


def test_a_wrong_graph_leaves_the_module_to_pytorch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_rule(monkeypatch, "Tanh", 1.01)
    module = two_layers(nn.Tanh())
    eager, model = copy.deepcopy(module), ORTModule(module, options=FALLBACK)
    with pytest.warns(OrtrainWarning, match=r"gradient 0\.weight differs"):
        model(rows()).sum().backward()
    model.zero_grad()
    for count in (3, 5):
        value = rows(count, 4)
        model(value).sum().backward()
        eager(value).sum().backward()
    assert torch.equal(module[0].weight.grad, eager[0].weight.grad)
    assert model.report.mode == "eager"
    assert "does not compute what PyTorch does" in model.report.reason
    assert model.report.captures == 1


class Hidden(nn.Module):
    """Trains a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.layer(value) * SCALE
        return result


SCALE = torch.ones(4, requires_grad=True)


def test_a_graph_knows_the_gradient_of_a_tensor_that_is_no_parameter() -> None:
    value = rows()
    model = ORTModule(Hidden(), options=GRAPH)
    found = []
    for each in (model, model.module):
        each(value).sum().backward()
        assert SCALE.grad is not None
        found.append(SCALE.grad)
        SCALE.grad = None
    torch.testing.assert_close(*found)
    assert "of 3 tensors" in model.report.certificate


def test_nan_is_no_number() -> None:
    good, bad = torch.randn(100), torch.randn(100)
    bad[3] = float("nan")
    elsewhere = bad.clone()
    elsewhere[[3, 4]] = elsewhere[[4, 3]]
    assert Digest.of(bad).alike(Digest.of(bad.clone()))
    assert not Digest.of(good).alike(Digest.of(bad))
    assert not Digest.of(bad).alike(Digest.of(elsewhere))
    infinite = good.clone()
    infinite[3] = -float("inf")
    assert not Digest.of(infinite).alike(Digest.of(good))
    assert not Digest.of(infinite).alike(Digest.of(-infinite))


@pytest.mark.parametrize("size", [1, 7, 1 << 14, 100_003])
def test_digests_tell_the_distance_of_two_tensors(size: int) -> None:
    one = torch.randn(size)
    assert Digest.of(one).distance(Digest.of(one.clone())) == 0.0
    for scale in (1e-5, 1e-2, 1.0):
        other = one + scale * torch.randn(size)
        true = float((one - other).double().square().mean().sqrt())
        assert 0.2 * true < Digest.of(one).distance(Digest.of(other)) < 5 * true + 1e-7


def test_digests_see_elements_that_change_places() -> None:
    one = torch.randn(3 << 14)
    generator = np.random.default_rng(0)
    for _ in range(50):
        i, j = generator.choice(len(one), 2, replace=False)
        other = one.clone()
        other[[i, j]] = other[[j, i]]
        true = float((one - other).square().mean().sqrt())
        assert Digest.of(one).distance(Digest.of(other)) > 0.1 * true


def test_whole_numbers_agree_exactly_or_not_at_all() -> None:
    one = torch.arange(1000)
    other = one.clone()
    other[7] += 1
    assert Digest.of(one).distance(Digest.of(other)) > 0
    assert Digest.of(one > 5).distance(Digest.of(one > 6)) > 0


# -- whole numbers and truth values --------------------------------------------------------------


class Metrics(nn.Module):
    """A classifier that returns what is right, its guesses, how many are right, and a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head = nn.Linear(64, 192), nn.Linear(64, 500)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.heads(x).view(-1, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        # Of which two engines have kernels that round otherwise.
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(attended.transpose(1, 2).reshape(-1, 64) + x).float()
        right = logits.gather(1, labels[:, None])[:, 0] >= logits.amax(1)
        loss = nn.functional.cross_entropy(logits, labels)
        return loss, right, logits.argmax(1), right.sum(), nn.functional.relu(logits) > 0


def metrics_of(dtype: torch.dtype) -> tuple[ORTModule, tuple[Tensor, ...]]:
    """Of so many rows that some of them are at ties in 16 bits."""
    torch.manual_seed(0)
    model = ORTModule(Metrics(), options=Options(engine="aten", fallback="raise"))
    x = torch.randn(2048, 64)
    with torch.no_grad():
        labels = model.module.head(x).argmax(1)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return model, model(x, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_at_ties_whole_numbers_may_differ(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    asked: list[bool] = []
    own = agreement._Row.is_of_ties

    def noted(row: Any, *runs: Any) -> bool:
        asked.append(own(row, *runs))
        return asked[-1]

    monkeypatch.setattr(agreement._Row, "is_of_ties", noted)
    model, (loss, *_) = metrics_of(dtype)
    loss.backward()
    assert model.report.mode == "graph"
    assert all(asked)
    assert bool(asked) == (dtype == torch.bfloat16)  # there is something to decide


def next_index(t: Any, data: Any, *, axis: int = 0, keepdims: int = 1) -> Any:
    return t.add(t.call("torch.argmax", t.tensor(data), axis, bool(keepdims)), 1)


def greater(t: Any, a: Any, b: Any) -> Any:
    return t.gt(t.tensor(a), t.tensor(b))


def greater_or_equal(t: Any, a: Any, b: Any) -> Any:
    return t.ge(t.tensor(a), t.tensor(b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("operator", "kernel", "name"),
    [
        ("ArgMax", next_index, "2"),
        ("GreaterOrEqual", greater, "1"),
        ("Greater", greater_or_equal, "4"),
    ],
    ids=["ArgMax", "GreaterOrEqual", "Greater"],
)
def test_whole_numbers_that_are_wrong_are_found_beside_ties(
    monkeypatch: pytest.MonkeyPatch, operator: str, kernel: Any, name: str, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(table.KERNELS, ("", operator), kernel)
    with pytest.raises(ParityError, match=f"output {name} differs"):
        metrics_of(dtype)


@pytest.mark.parametrize(
    ("moved", "ties", "agrees"),
    [(0, 0, True), (1, 0, False), (0, 40, True), (2, 40, True), (3, 40, False), (0, 60, False)],
)
def test_few_elements_that_are_wrong_in_all_runs_are_found(
    moved: int, ties: int, agrees: bool
) -> None:
    exact = torch.arange(100)

    def run(number: int, wrong: int) -> Evidence:
        drawn = torch.randint(0, 2, (100,), generator=torch.Generator().manual_seed(number))
        value = exact + drawn * (exact < ties)
        value[100 - wrong :] += 1
        return Evidence({"output": (Digest.of(value), False)}, discrete={"output": value})

    eager, graph = ([run(n + 10 * bool(w), w) for n in range(5)] for w in (0, moved))
    digests = [runs[0].outputs["output"][0] for runs in (eager, graph)]
    row = agreement._Row("output", "output", *digests, 1.0, 1.0, torch.float32)
    assert row.is_of_ties(eager, graph) is agrees


# -- what nobody notices -------------------------------------------------------------------------


def test_it_leaves_gradients_hooks_buffers_and_random_states_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    heard: list[Tensor] = []
    module[0].weight.register_hook(heard.append)
    module[0].weight.grad = torch.full((4, 4), 7.0)
    certified, plain = copy.deepcopy(module), copy.deepcopy(module)
    module[0].weight.register_hook(heard.append)
    value = rows()
    states = []
    for each, when in ((module, "first"), (plain, "off")):
        torch.manual_seed(3)
        model = ORTModule(each, options=replace(GRAPH, certificate=when))
        output = model(value)
        states.append((output, torch.get_rng_state(), copy.deepcopy(each.state_dict())))
    assert heard == []
    assert torch.equal(module[0].weight.grad, torch.full((4, 4), 7.0))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])
    for name, tensor in states[0][2].items():
        assert torch.equal(tensor, states[1][2][name]), name
    assert certified[1].num_batches_tracked == 0


def test_the_report_and_an_explanation_show_it() -> None:
    model = ORTModule(two_layers(nn.Dropout(0.3)), options=GRAPH)
    model(rows()).sum().backward()
    text = model.report.certificate
    assert text.startswith("outputs ")
    assert "of 4 tensors" in text
    assert f"certificate  {text}" in str(model.report)
    assert model.report.overhead is not None
    assert model.report.overhead.seconds["parity"] > 0


def test_it_is_made_for_evaluation_too() -> None:
    model = ORTModule(two_layers(nn.Tanh()).eval(), options=GRAPH)
    with torch.no_grad():
        model(rows())
    assert model.report.certificate.startswith("outputs ")
    assert "gradients" not in model.report.certificate


# -- when it is made -----------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes at which a comparison was made."""
    sizes: list[int] = []

    def proven(graph: Graph, form: Any, args: Sequence[Any], *more: Any) -> Any:
        sizes.append(len(args[graph.users[0]]))
        return own(graph, form, args, *more)

    own = proof.proven
    monkeypatch.setattr(proof, "proven", proven)
    return sizes


@pytest.mark.parametrize(
    ("when", "expected"),
    [("first", [3]), ("off", []), ("each size", [3, 5, 4]), (2, [3, 3, 4])],
)
def test_options_say_when(compared: list[int], when: Any, expected: list[int]) -> None:
    model = ORTModule(two_layers(nn.Tanh()), options=replace(GRAPH, certificate=when))
    for count in (3, 5, 3, 5, 4):
        model(rows(count, 4)).sum().backward()
    assert compared == expected


def test_each_set_of_trainable_parameters_is_compared_once(compared: list[int]) -> None:
    model = ORTModule(two_layers(nn.Tanh()), options=GRAPH)
    for frozen in (False, True, False, True):
        model.module[0].requires_grad_(not frozen)
        model(rows()).sum().backward()
    assert len(compared) == 2


@pytest.mark.parametrize("wrong", [0, -1, True, "always", 1.5])
def test_a_wrong_option_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="certificate="):
        Options(certificate=wrong)


# -- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)), (5, 4)),
        (nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2), nn.Dropout(0.9)), (4,)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout2d(0.5)), (2, 3, 5, 5)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8)),
        (nn.LSTM(4, 6, 3, dropout=0.4, batch_first=True), (2, 5, 4)),
    ],
)
def test_graph_and_eager_draw_the_same(module: nn.Module, shape: tuple[int, ...]) -> None:
    model = ORTModule(module, options=GRAPH)
    model(rows(*shape))
    assert largest_difference(model) < 1e-5


def largest_difference(model: ORTModule) -> float:
    """What the certificates of its graphs have found."""
    made = [graph.form.certificate for graph in model._runner.graphs.last.graphs]
    return max(difference for each in made for difference in each.differences.values())


def test_inside_a_checkpoint_too() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = two_layers(nn.Dropout(0.5))

        def forward(self, value: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, value, use_reentrant=False)
            return result

    model = ORTModule(Checkpointed(), options=GRAPH)
    model(rows()).sum().backward()
    assert largest_difference(model) < 1e-5


def test_a_large_batch_is_compared_by_its_first_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    own = proof._Trial.eager

    def eager(self: proof._Trial, *how: Any) -> Any:
        seen.append(len(self.args[self.own.users[0]]))
        return own(self, *how)

    monkeypatch.setattr(proof._Trial, "eager", eager)
    monkeypatch.setattr(proof, "ENOUGH", 500)
    model = ORTModule(two_layers(nn.Tanh()), options=GRAPH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(rows(64, 4)).sum().backward()
    assert len(seen) == 1
    assert 2 <= seen[0] <= 10, "48 multiplications a row"


def test_a_graph_that_knows_of_no_gradient_at_all_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ortrain.frontend.graph.influences", lambda *_: set())
    model = ORTModule(nn.Linear(3, 2), options=Options(engine="onnxruntime"))
    with pytest.warns(OrtrainWarning, match="requires a gradient in PyTorch only"):
        model(torch.randn(4, 3)).sum().backward()
    assert model.module.weight.grad is not None


def test_the_truth_of_sixteen_bits_is_not_rounded_by_the_modules_own_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else PyTorch would be without fault, and what rounds at another place refused."""

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.body(x).relu()
            return (hidden * self.scale).square().mean()

    trials: list[Any] = []

    def noting(eager: Any, graph: Any, trial: Any, rounded: Any) -> Any:
        trials.append(trial)
        return agreement.compare(eager, graph, trial, rounded)

    monkeypatch.setattr(proof, "compare", noting)
    model = ORTModule(Rounds(), options=Options(engine="aten", fallback="raise"))
    model(torch.randn(8, 16)).backward()
    (trial,) = trials
    truth, eager = agreement._in_truth(trial), trial.eager()
    assert truth is not None
    exact, rounded = truth.gradients["body.weight"], eager.gradients["body.weight"]
    assert exact is not None
    assert rounded is not None
    assert exact.distance(rounded) > 1e-4 * exact.scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_engines_are_rounded_alike(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Parameters, frozen ones too, and arguments: the products of such a module are the same."""
    pairs: list[tuple[Any, Any]] = []

    def noting(eager: Any, graph: Any, trial: Any, rounded: Any) -> Any:
        pairs.append((eager, graph))
        pairs.extend((trial.eager(rounding=number), rounded(number)) for number in (1, 2))
        return agreement.compare(eager, graph, trial, rounded)

    monkeypatch.setattr(proof, "compare", noting)
    module = two_layers(nn.ReLU())
    module[0].bias.requires_grad_(False)
    model = ORTModule(module, options=replace(GRAPH, engine="aten"))
    with torch.autocast("cpu", dtype):
        model(rows(16, 4).requires_grad_())
    outputs = []
    for eager, graph in pairs:
        theirs, ours = eager.tensors("output"), graph.tensors("output")
        assert theirs == ours
        outputs.append(next(iter(ours.values())))
        assert eager.gradients.keys() == graph.gradients.keys()
    assert outputs[0] != outputs[1] != outputs[2]
