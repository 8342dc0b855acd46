"""An ONNX model → its forward in both modes.

What ``requires_grad`` and ``frozen_params`` name become inputs; other initializers stay constants.
The modes are those that the file says: ``BatchNormalization`` with ``training_mode=1`` and
``Dropout`` with a true ``training_mode`` train, and are switched over for evaluation; all others
are what they are in both. That is how an exporter writes a model in training mode, and how a frozen
normalization stays frozen.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import InlinePass, NameFixPass

from ortrain.errors import GraphError, OrtrainError, OrtrainWarning, listing
from ortrain.files import seal
from ortrain.files.regular import expect_regular
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.external_data import read_into
from ortrain.graph.rewire import take_place
from ortrain.kinds import shown
from ortrain.ondevice import contract
from ortrain.ondevice.making.base import without_weights
from ortrain.ondevice.making.forward import Forward
from ortrain.ondevice.making.opsets import converted
from ortrain.ops.base import DOMAIN
from ortrain.passes.clean import RANDOM
from ortrain.program import PHASE, Phase, Program, Role, set_role

# Of one tensor: 8 GB of float32, more than a device has that trains.
MOST_ELEMENTS = 1 << 31


def from_onnx(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str],
    frozen_params: Sequence[str] = (),
    *,
    all_frozen: bool = False,
) -> Forward:
    """Reads a model.

    Args:
        model: the model, or the path of its file, which may have external data.
        requires_grad: names of the initializers to train.
        frozen_params: names of initializers that stand in the checkpoint and are not trained.
        all_frozen: freeze all others that are floating tensors, too.

    Raises:
        FileNotFoundError: there is no such file.
        GraphError: an initializer does not exist or cannot be trained, or the model holds what
            artifacts cannot have.
    """
    with foreign(model):
        proto = read(model)
        _check(proto)
        program = Program(_standard(proto))
        _refuse_random(program.graph)
        buffers = _statistics(program.graph)
        if all_frozen:
            frozen_params = _floating(program.graph, {*requires_grad, *buffers})
        tensors = _lift(program, requires_grad, frozen_params, buffers)
        shapes.infer_all(program.model)  # onnx's inference stops at operators of ours
        training, evaluation = program, program.clone()
        _train(training)
        _evaluate(evaluation)
        parameters = program.inputs(Role.PARAMETER)
        trainable = [v.name or "" for v in parameters if v.name in requires_grad]
        return Forward(training, evaluation, tensors, tuple(trainable))


def weights(model: onnx.ModelProto) -> list[str]:
    """Names of the initializers of a model that look like weights.

    They are floating tensors of more than one element, and no running statistics.

    Raises:
        GraphError: the model is not valid.
    """
    with foreign(model):
        _check(model)
        graph = ir.from_proto(model).graph
        statistics = {
            value.name
            for node in graph.all_nodes()
            if node.op_type == "BatchNormalization"
            for value in node.inputs[3:5]
            if value is not None
        }
        return _floating(graph, {name for name in statistics if name})


@contextmanager
def foreign(model: object) -> Iterator[None]:
    """What is raised inside, ortrain's own errors aside, is told as a fault of the model.

    A file from elsewhere may hold anything, and protobuf, onnx, onnx_ir and onnxruntime each have
    errors of their own for it.

    Args:
        model: the model, or the path of its file.

    Raises:
        GraphError: in place of any error but those of the file system.
    """
    try:
        yield
    except (OrtrainError, OSError):
        raise
    except Exception as error:
        at = "" if isinstance(model, onnx.ModelProto) else f" at {shown(os.fspath(str(model)))}"
        lines = str(error).strip().splitlines()
        raise GraphError(
            f"the ONNX model{at} cannot be used: {lines[0] if lines else type(error).__name__}",
            because=f"{type(error).__name__}: {error}",
            help="onnx.checker.check_model(model, full_check=True) says whether it is valid; if it "
            "is, please report it",
        ) from error


def read(model: onnx.ModelProto | str | os.PathLike[str]) -> onnx.ModelProto:
    """The model, of a file with its external data.

    Raises:
        FileNotFoundError: there is no such file.
        GraphError: it is no ONNX model.
        InputError: it is no regular file, its external data is not beside it, or it has a checksum,
            which is not that of its content.
    """
    if isinstance(model, onnx.ModelProto):
        return model
    if not expect_regular(model).exists():
        raise FileNotFoundError(f"there is no ONNX model at {os.fspath(model)!r}")
    seal.is_model_whole(model, f"ONNX model {os.fspath(model)}")
    with foreign(model), warnings.catch_warnings(action="ignore"):  # of keys that nobody needs
        proto = onnx.load(model, load_external_data=False)
        read_into(proto, Path(model))
        return proto


def _inferred(proto: onnx.ModelProto, checked: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the shapes of its values.

    Args:
        proto: the model.
        checked: the same without its weights.

    Raises:
        Exception: of onnx, where the graph contradicts itself and onnxruntime refuses it, too.
    """
    infer = onnx.shape_inference.infer_shapes
    try:
        return infer(checked, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError:
        # Some exporters declare shapes that are not those of the nodes, and onnxruntime takes its
        # own: it is the one to decide.
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            content = proto.SerializeToString()
            onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception:  # onnxruntime has no common base of its errors
            pass
        else:
            return infer(checked)
        raise


def _check(proto: onnx.ModelProto) -> None:
    """Raises where a model is not valid ONNX, or a tensor has not the size that it says."""
    if not proto.graph.node:
        raise GraphError("the ONNX model has no nodes", help="give a model that computes something")
    checked = without_weights(proto)
    made = {name for node in proto.graph.node for name in node.output}
    for output in proto.graph.output:
        # onnx refuses an output of unknown rank, as some exporters leave it; onnxruntime does not.
        if output.name in made and not output.type.tensor_type.HasField("shape"):
            checked.graph.output.remove(output)
    onnx.checker.check_model(checked)
    inferred = _inferred(proto, checked).graph
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if max(sizes, default=0) > MOST_ELEMENTS or math.prod(sizes) > MOST_ELEMENTS:
            raise GraphError(
                f"the tensor {value.name!r} of the model has the shape {sizes}",
                because=f"that is more than {MOST_ELEMENTS} elements",
                help="export the model with other sizes, or with open ones",
            )
    for tensor in proto.graph.initializer:
        if not onnx.external_data_helper.uses_external_data(tensor):
            onnx.numpy_helper.to_array(tensor)  # a view, mostly


def _standard(proto: onnx.ModelProto) -> ir.Model:
    """The model in the standard domain at opset 18 or above, without functions of its own."""
    version = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if version > onnx.defs.onnx_opset_version():
        raise GraphError(
            f"the model is of opset {version}, which onnx {onnx.__version__} does not know",
            help=f"export it again with opset_version={contract.OPSET}",
        )
    if version < contract.OPSET:
        try:
            proto = converted(proto, contract.OPSET)
        except Exception as error:
            raise GraphError(
                f"the model, of opset {version}, cannot be converted to opset {contract.OPSET}",
                because=str(error).strip().splitlines()[0],
                help=f"export it again with opset_version={contract.OPSET}",
            ) from error
    model = ir.from_proto(proto)
    model.ir_version = max(
        contract.IR_VERSION, onnx.helper.find_min_ir_version_for(proto.opset_import, True)
    )
    InlinePass()(model)
    for value in list(model.graph.inputs):
        if value.name in model.graph.initializers:  # a default of old files
            model.graph.inputs.remove(value)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.metadata_props[PHASE] = Phase.FORWARD.value
    NameFixPass()(model)
    return model


def _statistics(graph: ir.Graph) -> list[str]:
    """Names of the running statistics of normalizations by the batch, each with its own.

    Exporters write equal tensors once; two layers that both begin with zeros are still two.
    """
    owner: dict[str, ir.Value | None] = {}
    for node in graph.all_nodes():
        if not _normalizes_by_batch(node):
            continue
        for position in (3, 4):
            value = node.inputs[position]
            assert value is not None
            producer = value.producer()
            while producer is not None and producer.op_type == "Identity":
                value = producer.inputs[0]
                assert value is not None
                producer = value.producer()
            if not value.is_initializer():
                raise GraphError(
                    f"the running statistics {value.name!r} of a BatchNormalization are computed",
                    where=node.name or "",
                    help="they have to be initializers",
                )
            scale, name = node.inputs[1], value.name or ""
            if owner.setdefault(name, scale) is not scale:
                name = f"{node.outputs[0].name}.{('running_mean', 'running_var')[position - 3]}"
                value = ir.Value(
                    name=name, shape=value.shape, type=value.type, const_value=value.const_value
                )
                graph.register_initializer(value)
                owner[name] = scale
            node.replace_input_with(position, value)
    return list(owner)


def _floating(graph: ir.Graph, others: Collection[str]) -> list[str]:
    """Names of the floating initializers with more than one element."""
    tensors = {n: v.const_value for n, v in graph.initializers.items() if n not in others}
    return [
        name
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1
    ]


def _lift(
    program: Program,
    requires_grad: Sequence[str],
    frozen_params: Sequence[str],
    buffers: Sequence[str],
) -> dict[str, np.ndarray]:
    """Makes inputs of the initializers that are named; their tensors."""
    graph = program.graph
    for value in graph.inputs:
        set_role(value, Role.USER_INPUT)
    for value in graph.outputs:
        set_role(value, Role.USER_OUTPUT)
    trained, kept = set(requires_grad), set(frozen_params) | set(buffers)
    if both := trained & kept:
        raise GraphError(
            f"{min(both)!r} stands in requires_grad"
            + (" and in frozen_params" if min(both) in frozen_params else ""),
            because="" if min(both) in frozen_params else "it is a running statistic",
            help="leave it out of one of them",
        )
    for name in requires_grad:
        if name not in graph.initializers:
            raise _unknown(name, graph.initializers)
    if missing := [name for name in frozen_params if name not in graph.initializers]:
        warnings.warn(
            f"frozen_params has {listing(missing)}, of which the model has no initializer: they "
            "are in no checkpoint; an exporter leaves out what nothing reads, and folds what it "
            "can",
            OrtrainWarning,
            stacklevel=2,
        )
    tensors = {}
    # In the order of the file, whatever that of the arguments.
    roles = [(trained, Role.PARAMETER), (kept - set(buffers), Role.PARAMETER)]
    for names, role in (*roles, (set(buffers), Role.BUFFER)):
        for name in [name for name in graph.initializers if name in names]:
            value = graph.initializers.pop(name)
            tensor = value.const_value
            assert tensor is not None
            if name in trained and tensor.dtype != ir.DataType.FLOAT:
                raise GraphError(
                    f"{name!r} cannot be trained: its dtype is {tensor.dtype}",
                    help="train float32 initializers; list this one in frozen_params",
                )
            tensors[name] = np.array(tensor.numpy())
            shapes.assign(value, tensor.dtype, ir.Shape(tensors[name].shape))
            value.const_value = None
            graph.inputs.append(set_role(value, role))
    return tensors


def _unknown(name: str, known: Iterable[str]) -> GraphError:
    near = difflib.get_close_matches(name, known, 3)
    return GraphError(
        f"the model has no initializer {name!r}",
        because=f"it has {', '.join(near)}, …" if near else "",
        help="name initializers of the graph as the file does; an exporter may have folded this "
        "one into another: export with do_constant_folding=False",
    )


def _refuse_random(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if node.op_type in RANDOM and not node.domain:
            raise GraphError(
                f"the model draws random numbers with {node.op_type}",
                where=node.name or node.outputs[0].name or "",
                because="runtimes draw them differently, and a seed would not decide them",
                help="Dropout is served; give other draws as an input of the model",
            )


# -- modes -----------------------------------------------------------------------------------------


def _train(program: Program) -> None:
    """Ours in place of what trains in another way than it evaluates."""
    graph = program.graph
    current: dict[ir.Value, ir.Value] = {}
    seed, streams = None, 0
    for node in list(graph.all_nodes()):
        if _normalizes_by_batch(node):
            _by_batch(program, node, current)
        elif node.op_type == "Dropout" and not node.domain:
            ratio = _ratio(node)
            if not ratio:
                _pass_through(program, node)
                continue
            if seed is None:
                seed = ir.Value(name="seed", shape=ir.Shape([]))
                seed.type = ir.TensorType(ir.DataType.INT64)
                graph.inputs.append(set_role(seed, Role.SEED))
            with Builder.before(node, opset=program.opset) as op:
                inputs = [node.inputs[0], seed]
                new = op.node("Dropout", inputs, domain=DOMAIN, ratio=ratio, stream=streams)
            program.model.opset_imports.setdefault(DOMAIN, 1)
            _replace(node, new)
            streams += 1
    for buffer, value in current.items():
        value.name = f"{buffer.name}.updated"
        graph.outputs.append(set_role(value, Role.UPDATED_BUFFER, buffer.name or ""))


def _evaluate(program: Program) -> None:
    for node in list(program.graph.all_nodes()):
        if _normalizes_by_batch(node):
            with Builder.before(node, opset=program.opset) as op:
                options = {"epsilon": _attribute(node, "epsilon", 1e-5)}
                _replace(node, op.BatchNormalization(*node.inputs, **options))
        elif node.op_type == "Dropout" and not node.domain:
            _pass_through(program, node)


def _normalizes_by_batch(node: ir.Node) -> bool:
    training = _attribute(node, "training_mode", 0)
    return node.op_type == "BatchNormalization" and not node.domain and bool(training)


def _by_batch(program: Program, node: ir.Node, current: dict[ir.Value, ir.Value]) -> None:
    """``BatchNormalization<training_mode=1>`` → ``ortrain::BatchNorm``.

    The running variance takes the unbiased variance of the batch, as PyTorch's does; that of ONNX's
    operator takes the biased one.
    """
    x, weight, bias, *running = node.inputs
    latest = [current.get(value, value) for value in running if value is not None]
    with Builder.before(node, opset=program.opset) as op:
        y, _, _, *new = op.node(
            "BatchNorm",
            [x, weight, bias, *latest],
            domain=DOMAIN,
            outputs=5,
            momentum=1.0 - _attribute(node, "momentum", 0.9),
            eps=_attribute(node, "epsilon", 1e-5),
        )
    program.model.opset_imports.setdefault(DOMAIN, 1)
    for value, result in zip(running, new, strict=True):
        assert value is not None
        current[value] = result
    _replace(node, y)


def _ratio(node: ir.Node) -> float:
    """The ratio of a Dropout that trains; 0 of one that passes its input through."""
    training = shapes.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if len(node.inputs) > 2 and node.inputs[2] is not None and training is None:
        raise _dropout(node, "whether it trains is computed")
    ratio = shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if ratio is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        raise _dropout(node, "its ratio is computed")
    if training is None or not training.any():
        return 0.0
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise _dropout(node, "its mask is used")
    return 0.5 if ratio is None else float(ratio.reshape(()))


def _dropout(node: ir.Node, why: str) -> GraphError:
    return GraphError(
        "a Dropout of the model cannot be trained",
        where=node.name or node.outputs[0].name or "",
        because=why,
        help="export it with a constant ratio and training_mode, and without its mask",
    )


def _pass_through(program: Program, node: ir.Node) -> None:
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise _dropout(node, "its mask is used")
    with Builder.before(node, opset=program.opset) as op:
        _replace(node, op.Identity(node.inputs[0]))


def _replace(node: ir.Node, new: ir.Value) -> None:
    take_place(new, node.outputs[0])
    owner = node.graph
    assert owner is not None
    owner.remove(node, safe=True)


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return float(default if attribute is None else attribute.value)
