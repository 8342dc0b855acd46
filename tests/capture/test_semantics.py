"""What translations get wrong easily, which calls one capture serves, and what is refused, why."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of PyTorch uses
from torch import Tensor, nn

from ortrain.errors import CaptureError, UnsupportedInput
from ortrain.frontend.export import Exported, export
from ortrain.program import Role
from tests.capture.running import check
from tests.models import MODELS


class Calls(nn.Module):
    """Calls a function with itself and the arguments."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = [function]
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function[0](self, *args, **kwargs)


def agrees(function: Callable[..., Any], *batches: tuple[Tensor, ...], **members: Any) -> Exported:
    """Captures with the first batch, compares with all."""
    module = Calls(function, **members).train()
    exported = export(module, batches[0])
    for batch in batches:
        check(exported, module, *batch)
    return exported


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


def targets(count: int, classes: int = 4) -> Tensor:
    return torch.randint(0, classes, (count,))


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_smoothing_weight_and_ignored_targets(reduction: str) -> None:
    def loss(self: Any, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            logits,
            target,
            weight=self.weight,
            ignore_index=2,
            label_smoothing=0.2,
            reduction=reduction,
        )

    weight = torch.rand(4)
    exported = agrees(loss, (floats(9, 4), targets(9)), (floats(5, 4), targets(5)), weight=weight)
    assert exported.program.operators()["ortrain::CrossEntropy"] == 1


def test_cross_entropy_with_the_classes_on_the_second_axis() -> None:
    def loss(self: Any, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, ignore_index=1)

    agrees(
        loss,
        (floats(3, 4, 5), torch.randint(0, 4, (3, 5))),
        (floats(2, 4, 7), torch.randint(0, 4, (2, 7))),
    )


def test_cross_entropy_of_class_probabilities() -> None:
    def loss(self: Any, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target.softmax(-1), label_smoothing=0.1)

    agrees(loss, (floats(3, 4), floats(3, 4)), (floats(6, 4), floats(6, 4)))


def test_cross_entropy_that_ignores_a_symbolic_index() -> None:
    """Question answering ignores positions that lie behind the text."""

    def loss(self: Any, logits: Tensor, position: Tensor) -> Tensor:
        length = logits.size(1)
        return F.cross_entropy(logits, position.clamp(0, length), ignore_index=length)

    agrees(
        loss,
        (floats(3, 7), torch.tensor([0, 6, 50])),
        (floats(2, 5), torch.tensor([4, 50])),
    )


def test_other_losses() -> None:
    def losses(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (
            F.mse_loss(a, b),
            F.l1_loss(a, b, reduction="sum"),
            F.smooth_l1_loss(a, b),
            F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=self.weight),
            F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
        )

    agrees(losses, (floats(3, 4), floats(3, 4)), (floats(1, 4), floats(1, 4)), weight=torch.rand(4))


# -- attention -----------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.project = nn.Linear(8, 8 * 3)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = states.shape
        heads = self.project(states).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        return F.scaled_dot_product_attention(query, key, value, mask, **self.options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_attention_without_a_mask(options: dict[str, Any]) -> None:
    module = SelfAttention(**options)
    exported = export(module, (floats(3, 5, 8),))
    assert exported.program.operators()["ortrain::Attention"] == 1
    for shape in ((3, 5, 8), (2, 7, 8), (1, 1, 8)):
        check(exported, module, floats(*shape))


def test_attention_row_that_is_masked_entirely_gives_zeros() -> None:
    module = SelfAttention()
    mask = torch.rand(3, 1, 5, 5) > 0.5
    mask[1, :, 2] = False
    exported = export(module, (floats(3, 5, 8), mask))
    check(exported, module, floats(3, 5, 8), mask)
    check(exported, module, floats(2, 4, 8), torch.zeros(2, 1, 4, 4, dtype=torch.bool))


def test_attention_with_a_float_mask() -> None:
    module = SelfAttention()
    exported = export(module, (floats(3, 5, 8), floats(3, 1, 5, 5)))
    check(exported, module, floats(2, 6, 8), floats(2, 1, 6, 6))


def test_grouped_attention_repeats_keys_and_values() -> None:
    class Grouped(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            batch, length, _ = states.shape
            query = states.view(batch, length, 4, 2).transpose(1, 2)
            key = query[:, :2]
            return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    module = Grouped()
    exported = export(module, (floats(3, 5, 8),))
    check(exported, module, floats(2, 6, 8))


# -- gradient barriers ---------------------------------------------------------------------------


def test_detach_and_no_grad_regions_stop_the_gradient() -> None:
    def stopped(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).abs()
        return x / scale + x.detach()

    exported = agrees(stopped, (floats(3, 4),), (floats(1, 4),), layer=nn.Linear(4, 4))
    assert exported.program.operators()["ortrain::StopGradient"] == 2


def test_number_taken_out_of_a_tensor_has_no_gradient() -> None:
    exported = agrees(lambda self, x: x * x.sum().item(), (floats(3, 4),))
    assert exported.program.operators()["ortrain::StopGradient"] == 1


def test_region_with_autocast_off_is_inlined() -> None:
    def region(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x)

    agrees(region, (floats(3, 4),), layer=nn.Linear(4, 4))


# -- writing in place ----------------------------------------------------------------------------


def test_writes_into_views_of_a_new_tensor() -> None:
    def written(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        new = x * 2
        turned, piece = new.t(), new[:, 1:3]
        piece += 1
        tripled = turned * 3
        piece.mul_(2)
        new[:, 0] = 7
        new.masked_fill_(new > 1, 0.5)
        return new, turned, piece, tripled

    agrees(written, (floats(3, 4),), (floats(5, 4),))


def test_writes_into_a_reshaped_tensor_of_symbolic_sizes() -> None:
    def written(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        new = x * 2
        flat = torch.flatten(new, 1)
        F.dropout(flat, 0.0, training=True, inplace=True)
        flat.mul_(3)
        new.view(-1)[1:] += 1
        return new, flat + 1

    agrees(written, (floats(3, 4, 2),), (floats(5, 3, 2),))


def test_buffers_are_updated_in_place() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0).detach())
        self.calls.add_(1)
        return x * self.total

    agrees(
        count,
        (floats(3, 4),),
        (floats(1, 4),),
        total=nn.Buffer(torch.ones(4)),
        calls=nn.Buffer(torch.tensor(0)),
    )


def test_batch_norm_used_twice_updates_twice() -> None:
    exported = agrees(
        lambda self, x: self.norm(self.norm(x) * 2),
        (floats(4, 3),),
        (floats(6, 3),),
        norm=nn.BatchNorm1d(3),
    )
    assert exported.program.operators()["ortrain::BatchNorm"] == 2
    assert len(exported.program.outputs(Role.UPDATED_BUFFER)) == 3


# -- forms of calls ------------------------------------------------------------------------------


def test_nested_arguments_and_constant_outputs() -> None:
    def nested(self: Any, data: dict[str, Tensor], pair: list[Tensor], *, factor: int) -> Any:
        return {"sum": [data["x"] + pair[0], None, 3], "same": data["x"], "weight": self.weight}

    class Nested(Calls):
        def forward(self, data: Any, pair: Any, *, factor: int, unused: Any = None) -> Any:
            return self.function[0](self, data, pair, factor=factor)

    module = Nested(nested, weight=nn.Parameter(floats(2)))
    call = ({"x": floats(3, 4)}, [floats(3, 4), floats(3, 9)])
    exported = export(module, call, {"factor": 2, "unused": floats(3)})
    check(exported, module, *call, factor=2, unused=floats(3))
    assert exported.tensors == ("data.x", "pair.0", "pair.1", "unused")
    assert [v.name for v in exported.program.inputs(Role.USER_INPUT)] == ["data.x", "pair.0"]
    assert [v.name for v in exported.program.outputs()] == ["sum.0", "same", "weight_"]


def test_tensor_passed_twice_is_two_inputs() -> None:
    class Two(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            return first * 2, second * 3

    x, module = floats(2, 2), Two()
    exported = export(module, (x, x))
    check(exported, module, x, x + 1)


def test_input_named_like_a_parameter_gets_another_name() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(floats(4))
            self.unused = nn.Parameter(floats(4))

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.weight

    module = Clash()
    exported = export(module, (floats(3, 4),))
    assert [v.name for v in exported.program.graph.inputs] == ["weight_", "weight"]
    check(exported, module, floats(2, 4))


def test_keyword_that_the_forward_collects() -> None:
    module = MODELS["bert"].build()
    batch = MODELS["bert"].batch()
    exported = export(module, kwargs={**batch, "output_hidden_states": True})
    check(exported, module, **MODELS["bert"].batch(2, 5), output_hidden_states=True)


@pytest.mark.parametrize("number", [len, lambda x: int(x.shape[0])], ids=["len", "int"])
def test_a_size_as_a_number_does_not_fix_the_batch(number: Any) -> None:
    def positions(self: Any, x: Tensor) -> Tensor:
        return torch.arange(number(x))[:, None] * x

    agrees(positions, (floats(3, 4),), (floats(5, 4),))
    agrees(positions, (floats(1, 4),), (floats(5, 4),))


def test_symbolic_size_that_an_operator_needs_is_fixed() -> None:
    exported = agrees(
        lambda self, x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
        (floats(3, 4, 8, 8),),
        (floats(5, 4, 8, 8),),
    )
    assert not exported.accepts([(3, 4, 6, 6)])


def test_mixed_dtypes_are_promoted_as_torch_does() -> None:
    def mixed(self: Any, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return x + n, n / 2, n * 1.5, torch.where(n > 1, n, x), (x > n).sum(), torch.cat([x, n])

    agrees(mixed, (floats(3, 4), targets(12).view(3, 4)), (floats(2, 4), targets(8).view(2, 4)))


def test_what_a_mask_selects_has_a_size_of_its_own_in_every_call() -> None:
    def selected(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return x[mask], x[mask[:, 0], 1:].exp(), x[x > 0].sum()

    calls = [(floats(n, 3, 2), floats(n, 3) > 0) for n in (4, 6, 2)]
    agrees(selected, *calls, (floats(3, 3, 2), torch.zeros(3, 3, dtype=torch.bool)))


# -- what shapes a program serves ----------------------------------------------------------------


def test_conditions_on_sizes_are_kept() -> None:
    def halves(self: Any, x: Tensor, y: Tensor) -> Tensor:
        rows = x.shape[0]
        scale = 2 if rows % 2 == 0 else 3
        return x * scale + y.sum() if y.shape[0] == 2 * rows else x

    module = Calls(halves)
    exported = export(module, (floats(4, 5), floats(8, 3)))
    assert exported.accepts([(6, 5), (12, 3)])
    assert not exported.accepts([(5, 5), (10, 3)])
    assert not exported.accepts([(6, 5), (11, 3)])
    assert not exported.accepts([(6, 5, 1), (12, 3)])


def test_upper_bound_of_a_position_table_is_kept() -> None:
    case = MODELS["bert"]
    exported = export(case.build(), kwargs=case.batch())
    assert exported.accepts([(2, 64), (2, 64), (2,)])
    assert not exported.accepts([(2, 65), (2, 65), (2,)])
    assert not exported.accepts([(2, 64), (2, 63), (2,)])


def test_a_size_of_one_is_accepted() -> None:
    case = MODELS["bert"]
    assert export(case.build(), kwargs=case.batch()).accepts([(1, 7), (1, 7), (1,)])


# -- nothing is changed --------------------------------------------------------------------------


def test_export_changes_neither_module_nor_random_states() -> None:
    case = MODELS["cnn"]
    module = case.build(dropout=0.5)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = {path: set(vars(child)) for path, child in module.named_modules()}
    states = random.getstate(), torch.get_rng_state()
    export(module, kwargs=case.batch())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert {path: set(vars(child)) for path, child in module.named_modules()} == attributes
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.is_grad_enabled()


# -- refusals ------------------------------------------------------------------------------------


def refused(module: nn.Module, *args: Any, **kwargs: Any) -> CaptureError:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError) as caught:
            export(module, args, kwargs)
    return caught.value


def test_branch_on_data_is_refused_with_place_and_reason() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branch()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    error = refused(Outer(), floats(3))
    assert error.what == "Outer cannot become one graph"
    assert "Data-dependent branching" in error.because
    assert "test_semantics.py:" in error.where


def test_a_draw_that_takes_an_unknown_number_of_tries_is_refused() -> None:
    error = refused(Calls(lambda self, x: x * torch.poisson(x.exp())), floats(3))
    assert error.what == "aten::poisson draws random numbers"


@pytest.mark.parametrize(
    "draw",
    [
        lambda self: random.random(),
        lambda self: float(np.random.rand()),  # noqa: NPY002 - as users do
        lambda self: float(self.mine.random()),
    ],
    ids=["Python's", "numpy's", "the module's own"],
)
def test_numbers_that_no_trace_sees_drawn_are_refused_and_not_used_up(draw: Any) -> None:
    module = Calls(lambda self, x: x * draw(self), mine=np.random.default_rng(1))
    states = random.getstate(), np.random.get_state()[2], module.mine.bit_generator.state  # noqa: NPY002
    refused(module, floats(3))
    after = random.getstate(), np.random.get_state()[2], module.mine.bit_generator.state  # noqa: NPY002
    assert after == states


def test_attribute_assigned_in_forward_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    module = Counting()
    error = refused(module, floats(3))
    assert error.what == "what its code depends on changes from call to call"
    assert module.calls == 0


def test_write_into_an_argument_is_refused() -> None:
    error = refused(Calls(lambda self, x: x.add_(1)), floats(3))
    assert error.what == "its code writes to args.0, which is none of its buffers"
    assert "copy" in error.help


def test_autocast_is_part_of_a_program_around_and_inside() -> None:
    def region(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)

    module = Calls(region, layer=nn.Linear(4, 4))
    inside = export(module, (floats(3, 4),)).program
    with torch.autocast("cpu", torch.bfloat16):
        around = export(module.layer, (floats(3, 4),)).program
    for program in (inside, around):
        assert [v.dtype for v in program.graph.outputs] == [ir.DataType.BFLOAT16]


def test_sparse_embedding_is_refused() -> None:
    error = refused(nn.Embedding(5, 3, sparse=True), targets(4))
    assert "sparse=True" in error.what


def test_argument_of_another_type_is_unsupported() -> None:
    with pytest.raises(UnsupportedInput, match="is of type"):
        export(Calls(lambda self, x: x), (object(),))
