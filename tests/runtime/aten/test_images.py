"""Images lie with their channels last where convolutions gain from it; outside nobody sees it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from ortrain.autodiff import differentiate
from ortrain.graph.shapes import infer_all
from ortrain.program import Role, set_role
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten import writer as writing
from tests.programs import program

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN"
)
EXECUTOR = AtenExecutor()
LAST = torch.channels_last
IMAGE, WEIGHT = (2, 8, 12, 12), (8, 8, 3, 3)


def conv(op, x, w, **more):
    return op.Conv(x, w, pads=[1, 1, 1, 1], **more)


def between(body, **inputs):
    """What is computed between two convolutions, which it is given the result of."""

    def whole(op, x, w, **rest):
        first = conv(op, x, w)
        first.shape = ir.Shape(IMAGE)
        middle = body(op, first, **rest)
        return {"first": first, "middle": middle, "y": conv(op, middle, w)}

    subject = program(whole, {"x": IMAGE, "w": WEIGHT, **inputs})
    for value in subject.graph.outputs[:2]:
        set_role(value, Role.SAVED)  # which lies as the function has it
    return subject


def values_of(subject, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(*v.shape, generator=rng) for v in subject.graph.inputs]


def lies_last(tensor):
    return tensor.is_contiguous(memory_format=LAST) and not tensor.is_contiguous()


def sources(subject):
    return EXECUTOR.compile(EXECUTOR.lower(subject)).source


def copies(subject):
    return sources(subject).count("memory_format=torch.channels_last")


def split(op, x):
    a, b = op.node("Split", (x,), outputs=2, axis=1, num_outputs=2)
    return op.Concat(b, a, axis=1)


def bias(op, x):
    return op.Add(x, op.constant(np.ones((1, 8, 1, 1), np.float32)))


def batch_norm(op, x, s):
    return op.node("BatchNorm", (x, s, s, s, op.Exp(s)), domain="ortrain", outputs=5, momentum=0.1)[
        0
    ]


def resize(op, x, mode):
    scales = op.constant(np.array([1, 1, 2, 2], np.float32))
    return op.node("Resize", (x, None, scales), mode=mode)


POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
KEPT = {
    **{
        name: (lambda op, x, name=name: op.node(name, (x,)))
        for name in """
        Abs Celu Ceil Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Mish Neg Relu
        Round Selu Sigmoid Sign Softplus Softsign Tanh ThresholdedRelu
        """.split()
    },
    **{
        f"ortrain.{name}": (lambda op, x, name=name: op.node(name, (x,), domain="ortrain"))
        for name in ("Hardtanh", "Sigmoid", "Silu")
    },
    "Add": lambda op, x: op.Add(x, op.Relu(x)),
    "a bias": bias,
    "a number": lambda op, x: op.Mul(2.0, x),
    "Clip": lambda op, x: op.Clip(x, -0.5, 0.5),
    "Where": lambda op, x: op.Where(op.Greater(x, 0), x, op.Exp(x)),
    "a gate": lambda op, x: op.Mul(x, op.Sigmoid(op.GlobalAveragePool(x))),
    "MaxPool": lambda op, x: op.node("MaxPool", (x,), **POOL),
    "AveragePool": lambda op, x: op.node("AveragePool", (x,), **POOL),
    "ortrain.MaxPool": lambda op, x: op.node("MaxPool", (x,), domain="ortrain", outputs=2, **POOL)[
        0
    ],
    "nearest": lambda op, x: resize(op, x, "nearest"),
    "linear": lambda op, x: resize(op, x, "linear"),
    "Concat": split,
    "depthwise": lambda op, x: op.Conv(
        x, op.constant(np.ones((8, 1, 3, 3), np.float32)), pads=[1, 1, 1, 1], group=8
    ),
    "ConvTranspose": lambda op, x: op.ConvTranspose(
        x, op.constant(np.ones((8, 8, 2, 2), np.float32)), strides=[2, 2]
    ),
    "Pad": lambda op, x: op.Pad(x, op.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1]))),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_operator_between_convolutions_keeps_the_order_without_a_copy(name):
    subject = between(KEPT[name])
    compiled = EXECUTOR.compile(EXECUTOR.lower(subject))
    first, middle, y = compiled.run_values(values_of(subject))
    assert compiled.source.count("memory_format=torch.channels_last") == 1, compiled.source
    assert lies_last(first)
    assert middle.dim() == 4
    assert lies_last(middle), compiled.source
    assert y.is_contiguous()


def test_a_norm_over_a_batch_keeps_the_order():
    subject = between(batch_norm, s=(8,))
    first, middle, _ = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values(values_of(subject))
    assert lies_last(first)
    assert lies_last(middle)


GROUPS = {
    "GroupNormalization": lambda op, x, s: op.node(
        "GroupNormalization", (x, s, s), num_groups=4, epsilon=1e-5
    ),
    "InstanceNormalization": lambda op, x, s: op.InstanceNormalization(x, s, s),
    "ortrain.GroupNorm": lambda op, x, s: op.node(
        "GroupNorm", (x, s, s), domain="ortrain", outputs=3, num_groups=4
    )[0],
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_norm_over_groups_takes_rows_and_the_order_goes_on_behind_it(name):
    """With its channels last PyTorch adds up a group's numbers in one running float32."""
    subject = between(GROUPS[name], s=(8,))
    compiled = EXECUTOR.compile(EXECUTOR.lower(subject))
    values = values_of(subject)
    first, middle, _ = compiled.run_values([*values])
    assert compiled.source.count("memory_format=torch.channels_last") == 2
    assert lies_last(first)
    assert lies_last(middle)
    groups = 8 if name.startswith("Instance") else 4
    rows = torch.group_norm(first.contiguous(), groups, values[2], values[2])
    torch.testing.assert_close(middle.contiguous(), rows, rtol=0, atol=0)


@pytest.mark.parametrize("first", [False, True])
def test_one_image_for_a_whole_batch_is_brought_into_the_order(first):
    """Its strides would decide about those of the result."""

    def body(op, x, p):
        return op.Add(p, x) if first else op.Add(x, p)

    subject = between(body, p=(1, *IMAGE[1:]))
    middle = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values(values_of(subject))[1]
    assert lies_last(middle)


def test_an_input_is_copied_where_it_is_first_read_and_once():
    """Not where only its size is: the copy would be there all the time until then."""

    def body(op, x, w, late):
        sized = op.Mul(conv(op, x, w), op.Cast(op.Size(late), to=ir.DataType.FLOAT))
        return conv(op, op.Add(conv(op, sized, w), op.Mul(conv(op, late, w), late)), w)

    subject = program(body, {"x": IMAGE, "w": WEIGHT, "late": IMAGE})
    compiled = EXECUTOR.compile(EXECUTOR.lower(subject))
    lines = compiled.source.splitlines()
    copied = [i for i, line in enumerate(lines) if "memory_format=torch.channels_last" in line]
    read = [i for i, line in enumerate(lines) if ".conv2d(" in line]
    assert len(copied) == 2
    assert read[1] < copied[1] < read[2], compiled.source


TRAINED = {**KEPT, "BatchNorm": batch_norm}
FLAT = {"Ceil", "Floor", "Round", "Sign"}


@pytest.mark.parametrize("name", [n for n in TRAINED if n not in FLAT])
def test_the_backward_copies_only_what_comes_from_outside(name, monkeypatch):
    extra = {"s": (8,)} if name == "BatchNorm" else {}

    def body(op, x, w, **rest):
        middle = TRAINED[name](op, conv(op, x, w), **rest)
        if middle.producer().domain:  # ONNX's inference knows no operators of ours
            middle.shape = ir.Shape((2, 8, 6, 6) if "Pool" in name else IMAGE)
        return op.ReduceSum(conv(op, middle, w), keepdims=0)

    subject = program(body, {"x": IMAGE, "w": WEIGHT, **extra})
    infer_all(subject.model)
    training = differentiate(subject, ["x", "w"], keep=EXECUTOR.keeps)
    values = [*values_of(subject), torch.ones([])]
    compiled = EXECUTOR.compile(EXECUTOR.lower(training))
    found = compiled.run_values([*values])
    # x, and the gradient of the sum, which is one number in all places; that of a resized image is
    # a product
    count = 3 if name in ("nearest", "linear") else 2
    assert compiled.source.count("memory_format=torch.channels_last") == count, compiled.source
    assert all(result.is_contiguous() for result in found)
    monkeypatch.setattr(writing, "channels_last", lambda *_: frozenset())
    plain = EXECUTOR.compile(EXECUTOR.lower(training)).run_values([*values])
    for result, expected in zip(found, plain, strict=True):
        scale = expected.abs().max().item() or 1.0
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-6 * scale)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN convolves no bfloat16 here"
)
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
@pytest.mark.parametrize(("window", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_gradients_of_depthwise_convolutions_in_bfloat16_are_rounded_once(window, stride, needs):
    """Also those that oneDNN has no kernel of 16 bits for, which are computed in float32."""
    pads = [window // 2] * 4
    form = {"pads": pads, "strides": [stride] * 2, "dilations": [1, 1], "group": 8}
    size = (12 + 2 * pads[0] - window) // stride + 1

    def body(op, dy, x, w):
        found = op.node(
            "ConvGradient", (dy, x, w), domain="ortrain", outputs=3, needs=list(needs), **form
        )
        names = ("dx", "dw", "db")
        return {n: v for n, v, flag in zip(names, found, needs, strict=True) if flag}

    sizes = {"dy": (2, 8, size, size), "x": IMAGE, "w": (8, 1, window, window)}
    dtype = np.dtype(ml_dtypes.bfloat16)
    subject = program(body, sizes, dtype=dtype)
    dy, x, w = (t.bfloat16() for t in values_of(subject))
    compiled = EXECUTOR.compile(EXECUTOR.lower(subject))
    wide = (stride > 1 and needs[0]) or (window > 3 and needs[1])
    assert (".to(torch.float32)" in compiled.source) == bool(wide)
    wanted = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), w.double(), [8], [stride] * 2, pads[:2], [1, 1], False, [0, 0], 8,
        [bool(n) for n in needs],
    )  # fmt: skip
    found = compiled.run_values([dy, x, w])
    for ours, exact in zip(found, [v for v in wanted if v is not None], strict=True):
        assert ours.dtype is torch.bfloat16
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error < 2.0**-8


@pytest.mark.parametrize("given", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("batch", [1, 2])
def test_images_of_one_channel_are_told_apart_by_their_strides(batch, given):
    def body(op, x, w, v):
        first = conv(op, x, w)
        return {"first": first, "y": conv(op, op.Relu(first), v)}

    subject = program(body, {"x": (batch, 1, 12, 12), "w": (8, 1, 3, 3), "v": WEIGHT})
    set_role(subject.graph.outputs[0], Role.SAVED)
    x, w, v = values_of(subject)
    held = x.expand(-1, 1, -1, -1).contiguous(memory_format=given)
    first, y = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values([held, w, v])
    assert lies_last(first)
    wanted = torch.conv2d(torch.conv2d(x, w, padding=1).relu(), v, padding=1)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-4)


def test_patches_that_tile_an_image_stay_as_they_are():
    def body(op, x, w):
        return op.Conv(x, w, strides=[4, 4])

    assert not copies(program(body, {"x": (2, 3, 16, 16), "w": (8, 3, 4, 4)}))


@pytest.mark.parametrize(
    ("shape", "weight"), [((2, 3, 16), (4, 3, 3)), ((1, 2, 4, 5, 6), (3, 2, 3, 3, 3))]
)
def test_images_of_one_and_of_three_axes_stay_as_they_are(shape, weight):
    assert not copies(program(lambda op, x, w: op.Conv(x, w), {"x": shape, "w": weight}))


def test_float64_which_onednn_does_not_convolve_stays_as_it_is():
    body = program(lambda op, x, w: conv(op, x, w), {"x": IMAGE, "w": WEIGHT}, dtype=np.float64)
    assert not copies(body)


def test_what_is_no_image_is_left_alone():
    """Rows that were made of images, and attention of four axes."""

    def body(op, x, w, q):
        rows = op.Transpose(op.Reshape(conv(op, x, w), [2, 8, 144]), perm=[0, 2, 1])
        scores = op.MatMul(q, op.Transpose(q, perm=[0, 1, 3, 2]))
        return {"rows": op.Relu(rows), "scores": op.Softmax(op.Relu(scores), axis=-1)}

    subject = program(body, {"x": IMAGE, "w": WEIGHT, "q": (2, 4, 6, 5)})
    assert copies(subject) == 1
    results = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values(values_of(subject))
    assert all(r.is_contiguous() for r in results)


@pytest.mark.parametrize("given", [torch.contiguous_format, LAST])
def test_an_image_is_taken_in_either_order_and_results_have_rows(given):
    subject = program(lambda op, x, w: op.Relu(conv(op, x, w)), {"x": IMAGE, "w": WEIGHT})
    x, w = values_of(subject)
    held = x.clone(memory_format=given)
    (y,) = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values([held, w])
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.relu(torch.conv2d(x, w, padding=1)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(held, x, rtol=0, atol=0)


@pytest.mark.parametrize("name", KEPT)
def test_results_have_rows_whatever_makes_them(name):
    def body(op, x, w):
        return {"y": KEPT[name](op, conv(op, x, w))}

    subject = program(body, {"x": IMAGE, "w": WEIGHT})
    (y,) = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values(values_of(subject))
    assert y.is_contiguous()


def test_an_input_that_is_given_back_is_another_tensor():
    """Even if it already lies as the function wants it."""
    subject = program(
        lambda op, x, w: {"y": conv(op, x, w), "z": op.Identity(x)}, {"x": IMAGE, "w": WEIGHT}
    )
    x, w = values_of(subject)
    x = x.contiguous(memory_format=LAST)
    _, z = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values([x, w])
    z.zero_()
    assert x.any()


def test_programs_of_random_operators_compute_what_they_compute_with_channels_first(monkeypatch):
    changing = {"Pad", "nearest", "linear", "ConvTranspose"}
    names = [n for n in KEPT if n not in changing and "Pool" not in n]
    for seed in range(12):
        dice = np.random.default_rng(seed)
        chosen = [names[i] for i in dice.integers(len(names), size=6)]

        def body(op, x, w, chosen=chosen):
            kept = [x]
            for name in chosen:
                kept.append(op.Add(KEPT[name](op, conv(op, kept[-1], w)), kept[-1]))
            return {f"y{i}": op.Identity(v) for i, v in enumerate(kept[1:])}

        subject = program(body, {"x": IMAGE, "w": WEIGHT})
        values = values_of(subject, seed)
        values[1] = values[1] * 0.1
        found = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values([*values])
        with monkeypatch.context() as patch:
            patch.setattr(writing, "channels_last", lambda *_: frozenset())
            plain = EXECUTOR.compile(EXECUTOR.lower(subject)).run_values([*values])
        for result, expected in zip(found, plain, strict=True):
            finite = expected[expected.isfinite()]
            atol = 1e-5 * float(finite.abs().max()) if finite.numel() else 0.0
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=atol, equal_nan=True)
            assert result.is_contiguous()


def test_regions_grow_through_operators_in_any_order_of_the_graph():
    """What joins two regions late still gives them one order."""

    def body(op, x, z, w):
        other = op.Relu(z)
        return op.Add(conv(op, x, w), other)

    subject = program(body, {"x": IMAGE, "z": IMAGE, "w": WEIGHT})
    found = writing.channels_last(EXECUTOR.lower(subject).graph, torch.device("cpu"))
    assert {v.name for v in found if isinstance(v, ir.Value)} >= {"x", "z", "y"}


def test_off_the_cpu_there_are_none():
    subject = program(lambda op, x, w: conv(op, x, w), {"x": IMAGE, "w": WEIGHT})
    assert not writing.channels_last(subject.graph, torch.device("cuda"))
