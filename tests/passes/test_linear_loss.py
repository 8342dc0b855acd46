"""The loss of a large vocabulary is made in blocks of rows where nobody reads its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from ortrain.frontend.export import export
from ortrain.graph import shapes
from ortrain.passes import linear_loss
from ortrain.passes.linear_loss import in_blocks, rows_of
from ortrain.program import Program, Role, width_of
from tests.token_cases import Trained

CLASSES, WIDTH, BATCH, LENGTH = 23, 6, 3, 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of this size are large, and a block has four rows."""
    monkeypatch.setattr(linear_loss, "CLASSES", CLASSES)
    monkeypatch.setattr(linear_loss, "BLOCK", 0)
    monkeypatch.setattr(linear_loss, "NARROW_BLOCK", 0)
    monkeypatch.setattr(linear_loss, "ROWS", 4)


class Words(nn.Module):
    """Words, and a loss of what a head makes of them."""

    def __init__(self, head: Callable[[Words, Tensor, Tensor], Any], classes: int = CLASSES):
        super().__init__()
        self.embedding = nn.Embedding(classes, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, classes)
        self.flipped = nn.Parameter(torch.randn(WIDTH, classes))
        self.bias = nn.Parameter(torch.randn(classes))
        self.register_buffer("shares", torch.linspace(0.5, 2.0, classes))
        self.head = head

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.head(self, torch.tanh(self.hidden(self.embedding(ids))), labels)


def flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits[:, :-1].contiguous(), labels[:, 1:].contiguous())


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, WIDTH)


LAYERS: dict[str, Callable[[Words, Tensor], Tensor]] = {
    "linear": lambda m, x: m.output(x),
    "of rows": lambda m, x: m.output(rows(x)).view(BATCH, LENGTH, CLASSES),
    "tied": lambda m, x: F.linear(x, m.embedding.weight),
    "tied with bias": lambda m, x: F.linear(x, m.embedding.weight) + m.bias,
    "bias of a row": lambda m, x: F.linear(x, m.embedding.weight) + m.bias.unsqueeze(0),
    "tied of rows": lambda m, x: F.linear(rows(x), m.embedding.weight, m.bias),
    "flipped": lambda m, x: x @ m.flipped,
    "flipped of rows": lambda m, x: torch.addmm(m.bias, rows(x), m.flipped),
    "frozen": lambda m, x: F.linear(x, m.shares.unsqueeze(1).expand(-1, WIDTH).contiguous()),
    "of frozen words": lambda m, x: m.output(x.detach()),
}
LOSSES: dict[str, Callable[[Words, Tensor, Tensor], Tensor]] = {
    "mean": lambda m, x, y: flat(x, y),
    "sum": lambda m, x, y: flat(x, y, reduction="sum") / 7,
    "smoothed": lambda m, x, y: flat(x, y, label_smoothing=0.1),
    "weighted": lambda m, x, y: flat(x, y, weight=m.shares),
    "weighted and smoothed": lambda m, x, y: flat(x, y, weight=m.shares, label_smoothing=0.2),
    "ignoring": lambda m, x, y: flat(x, y.clamp(min=0), ignore_index=0),
    "times a number": lambda m, x, y: 3 * flat(x, y) + x.new_ones(()),
    "in float32": lambda m, x, y: flat(x.float(), y),
    "of classes in the middle": lambda m, x, y: F.cross_entropy(
        x.view(BATCH, LENGTH, CLASSES).transpose(1, 2), y
    ),
}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(CLASSES, (BATCH, LENGTH), generator=generator) for _ in "ab")
    labels[0, :2], labels[2, 3] = -100, -100
    return {"ids": ids, "labels": labels}


def exported(module: nn.Module, **options: Any) -> Program:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
        return export(module, (), batch()).program


def of_classes(program: Program) -> list[str | None]:
    """Values that have a row of all classes and are no weights."""
    weights = (WIDTH,)
    return [
        value.name
        for node in program.graph.all_nodes()
        for value in node.outputs
        if (dims := shapes.dims(value))
        and dims[-1] == CLASSES
        and dims[:-1] not in (weights, (1,), ())
    ]


def check(module: nn.Module, shown: Any, autocast: bool = False, rtol: float = 2e-5) -> None:
    program = exported(module, autocast=autocast)
    found = in_blocks(program, shown)
    assert found is not None
    made, hidden = found
    assert in_blocks(made, shown) is None
    assert not of_classes(made)
    outputs = made.outputs(Role.USER_OUTPUT, Role.LOSS)
    before = program.outputs(Role.USER_OUTPUT, Role.LOSS)
    assert [v.name for v in outputs] == [v.name for v in before]
    assert [v.dtype for v in outputs] == [v.dtype for v in before]
    given = batch()
    for engine in ("aten",) if autocast else ("aten", "onnxruntime", "reference"):
        ours, gradients = Trained(module, made, engine)(given)
        dense, expected = Trained(module, program, engine)(given)
        torch.testing.assert_close(ours[0], dense[0], rtol=1e-6, atol=1e-6)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(
                gradients[name], gradient, rtol=rtol, atol=rtol * largest, msg=name
            )
        for i in hidden:
            assert ours[i].shape == dense[i].shape
            assert not ours[i].any()


@pytest.mark.parametrize("layer", LAYERS)
def test_each_kind_of_layer_is_found_and_computes_the_same(layer: str) -> None:
    check(Words(lambda m, x, y: flat(LAYERS[layer](m, x), y)), "all")


@pytest.mark.parametrize("loss", LOSSES)
def test_each_kind_of_loss_is_found_and_computes_the_same(loss: str) -> None:
    check(Words(lambda m, x, y: LOSSES[loss](m, m.output(x), y)), "all")


# A bias that is added in float32 behind a product in bfloat16 is no part of a layer.
ROUNDED = sorted({*LAYERS} - {"tied with bias", "bias of a row"})


@pytest.mark.parametrize("layer", ROUNDED)
def test_so_they_are_under_autocast(layer: str) -> None:
    """Of both, the gradients are as far from the truth as bfloat16 is."""
    module = Words(lambda m, x, y: flat(LAYERS[layer](m, x).float(), y))
    check(module, "all", autocast=True, rtol=2e-2)


@pytest.mark.parametrize("loss", [flat, shifted])
@pytest.mark.parametrize("layer", ["linear", "tied with bias", "flipped"])
def test_logits_that_nobody_reads_are_zeros_of_their_shape(
    layer: str, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def head(m: Words, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = LAYERS[layer](m, x)
        return loss(logits, y), logits

    check(Words(head), "loss")
    program = exported(Words(head))
    assert in_blocks(program, "all") is None
    made, hidden = in_blocks(program, "loss") or (program, ())
    assert hidden == (1,)
    logits = made.outputs(Role.USER_OUTPUT)[1]
    assert width_of(logits) == CLASSES
    assert (shapes.dims(logits) or ())[-1] == 1


def test_two_losses_of_two_heads_are_both_in_blocks() -> None:
    check(Words(lambda m, x, y: flat(m.output(x), y) + 2 * flat(x @ m.flipped, y)), "all")


def test_a_frozen_weight_has_no_gradient_that_is_made() -> None:
    module = Words(lambda m, x, y: flat(m.output(x), y))
    for parameter in module.output.parameters():
        parameter.requires_grad_(False)
    made, _ = in_blocks(exported(module), "all") or (None, ())
    assert made is not None
    trained = Trained(module, made)
    (node,) = [n for n in trained.step.plan.programs[0].graph if n.op_type == "LinearCrossEntropy"]
    assert list(node.attributes["needs"].as_ints()) == [1, 0, 0]


# -- where they stay ---------------------------------------------------------------------------


class Checkpointed(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return checkpoint(super().forward, ids, labels, use_reentrant=False)


def read_twice(m: Words, x: Tensor, y: Tensor) -> Tensor:
    logits = m.output(x)
    return flat(logits, y) + logits.square().mean()


OTHERS: dict[str, Callable[[Words, Tensor, Tensor], Any]] = {
    "a loss for each row": lambda m, x, y: flat(m.output(x), y, reduction="none").sum(),
    "logits that are bounded": lambda m, x, y: flat(torch.tanh(m.output(x)), y),
    "some of the classes": lambda m, x, y: flat(
        torch.cat([m.output(x), m.output(x)], -1)[..., :CLASSES], y
    ),
    "logits that are read": read_twice,
    "the logits first": lambda m, x, y: ((z := m.output(x)), flat(z, y)),
    "the logits too": lambda m, x, y: (flat(z := m.output(x), y), z),
    "logits of other rows": lambda m, x, y: flat(m.output(x).transpose(0, 1), y),
    "labels that are shares": lambda m, x, y: F.cross_entropy(
        m.output(x).flatten(0, 1), torch.softmax(x @ m.flipped, -1).flatten(0, 1)
    ),
    "two numbers of rows": lambda m, x, y: flat(m.output(x).flatten(0, 1)[1:], y.flatten()[1:]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_elsewhere_or_is_another_loss_stays(name: str) -> None:
    program = exported(Words(OTHERS[name]))
    before = program.text()
    assert in_blocks(program, "all") is None
    assert program.text() == before


def test_logits_in_the_first_place_are_no_loss() -> None:
    assert in_blocks(exported(Words(OTHERS["the logits first"])), "loss") is None


def test_small_vocabularies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CLASSES", CLASSES + 1)
    assert in_blocks(exported(Words(lambda m, x, y: flat(m.output(x), y)))) is None


def test_checkpointed_regions_stay() -> None:
    module = Checkpointed(lambda m, x, y: flat(m.output(x), y))
    assert in_blocks(exported(module)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_in_16_bits_stay(dtype: torch.dtype) -> None:
    module = Words(lambda m, x, y: flat(m.output(x), y)).to(dtype)
    assert in_blocks(exported(module)) is None


def test_products_in_float16_stay_whose_gradients_may_vanish() -> None:
    module = Words(lambda m, x, y: flat(m.output(x).float(), y))
    assert in_blocks(exported(module.to(torch.float16))) is None
    assert in_blocks(exported(module.to(torch.bfloat16))) is not None


def test_a_block_has_as_many_rows_as_its_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for classes in (8192, 30522, 50257, 151936):
        program = exported(Words(lambda m, x, y: flat(m.output(x), y), classes))
        made, _ = in_blocks(program) or (program, ())
        (node,) = [n for n in made.graph if n.op_type == "LinearCrossEntropy"]
        given = node.attributes["rows"].as_int()
        assert given == rows_of(classes, ir.DataType.FLOAT) >= linear_loss.ROWS
        assert isinstance(node.attributes["rows"], ir.Attr)
