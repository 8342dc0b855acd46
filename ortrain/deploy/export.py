"""``export_onnx``: a module as an ONNX file, compared with PyTorch before it is kept."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from ortrain.aside import modes_kept
from ortrain.capture.onnx.lift import drop_unused_inputs
from ortrain.deploy.unread import note
from ortrain.errors import CaptureError, GraphError, ParityError, listing
from ortrain.files.replacing import staged
from ortrain.frontend.export import Exported, export
from ortrain.key_value_cache import without_cache
from ortrain.kinds import NONE, expect, expect_names, expect_path, expect_whole
from ortrain.module import unwrap
from ortrain.ops import expand
from ortrain.passes.clean import clean
from ortrain.program import Program, Role
from ortrain.pytorch import pytree

# Largest difference of an output, relative to its largest value or to 1. Float32 summed in another
# order differs by about 1e-6; a wrong graph, by far more than this.
TOLERANCE = 1e-4
_FIRST = "the module's code holds for the sizes of the first call alone; nothing was written"


def export_onnx(
    module: torch.nn.Module,
    samples: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    opset: int = 21,
    outputs: Sequence[str] | None = None,
    dimensions: Sequence[str] = (),
    external_data_above: int = 1 << 26,
) -> float:
    """Writes a module in evaluation mode as an ONNX file with its weights.

    Inputs are named as the arguments of ``forward``, outputs as the keys of its result, those
    inside others with dots: ``past.0.key``. All sizes stay open as far as the module's code allows.
    Decoders answer without a key-value cache. Nothing appears at ``path`` unless the file answers
    as the module does.

    Args:
        module: a module, or an ORTModule around one; its mode stays as it is.
        samples: keyword arguments of calls to compare, at least one: tensors, and dicts, lists and
            tuples of them. The first one is exported.
        path: the file to write; its folder is made where it does not exist.
        opset: of the standard ONNX domain, 18 to 23.
        outputs: names of those that the file is to have; by default all.
        dimensions: names of the inputs' open dimensions, by axis: ``("batch", "sequence")``. Where
            inputs differ on an axis, the first one's dimension has the name.
        external_data_above: bytes of weights beyond which they go to ``path`` + ``.data``.

    Returns:
        The largest difference of an output, relative to its largest value or to 1.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the module has no output of a name in ``outputs``, ``samples`` is empty, or the
            opset is none of these.
        CaptureError: the module cannot become one graph.
        GraphError: it draws random numbers in evaluation.
        ParityError: the file answers otherwise than the module.
        SaveError: the file could not be written.
    """
    expect("module", module, torch.nn.Module, "a torch.nn.Module")
    expect("samples", samples, Sequence, "a list of the keyword arguments of calls")
    if not samples:
        raise ValueError("samples is empty: give the keyword arguments of one call at least")
    for sample in samples:
        expect("samples", sample, Mapping, "a list of dicts, the keyword arguments of calls")
    expect_path("path", path, expected="the path of a file")
    expect_whole("opset", opset)
    if not 18 <= opset <= 23:
        raise ValueError(f"opset={opset}: expected 18 to 23")
    expect_names("outputs", outputs, NONE)
    expect_names("dimensions", dimensions)
    expect_whole("external_data_above", external_data_above)
    module, target = unwrap(module), Path(path)
    with modes_kept(module), torch.no_grad(), without_cache(module):
        module.eval()
        exported = _exported(module, samples, opset)
        program = _standalone(module, exported, outputs)
        expected = [_flat(module(**sample)) for sample in samples]
    _name_dimensions(program, dimensions)
    taken = {value.name for value in program.inputs()}
    note(program.model.metadata_props, [name for name in _flat(samples[0]) if name not in taken])
    with staged(target.parent, target.name, "ONNX file") as folder:
        written = folder / target.name
        program.save(written, external_data_above)
        difference = _difference(written, samples, expected)
        if not difference <= TOLERANCE:
            raise ParityError(
                f"the ONNX file differs from PyTorch by {difference:.1e}",
                because=f"more than {TOLERANCE:.0e} of the largest value is no rounding",
                help="please report the model; nothing was written",
            )
    return difference


def _exported(
    module: torch.nn.Module, samples: Sequence[Mapping[str, Any]], opset: int
) -> Exported:
    """The program of the first sample, for images of any size where the code has one for all.

    Swin's layers set the size of their windows by that of the image.

    Raises:
        CaptureError: the module cannot become one graph.
    """
    call = dict(samples[0])
    try:
        return export(module, (), call, opset=opset)
    except CaptureError:
        sizes = [
            {name: t.shape[1:] for name, t in _flat(sample).items() if t.ndim >= 4}
            for sample in samples
        ]
        if not sizes[0] or any(each != sizes[0] for each in sizes):
            raise
        try:
            return export(module, (), call, opset=opset, still=True)
        except CaptureError:
            pass
        raise


def _standalone(
    module: torch.nn.Module, exported: Exported, outputs: Sequence[str] | None
) -> Program:
    """The program with the weights inside and these outputs, in standard ONNX."""
    program = exported.program.clone()
    graph = program.graph
    if program.inputs(Role.SEED):
        raise GraphError(
            f"{type(module).__name__} draws random numbers in evaluation",
            help="an ONNX file answers the same call in the same way; take the draw out",
        )
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for value in program.inputs(Role.PARAMETER, Role.BUFFER):
        graph.inputs.remove(value)
        value.const_value = ir.tensor(tensors[value.name or ""].detach().cpu().contiguous().numpy())
        graph.register_initializer(value)
    users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
    named = dict(zip(_output_names(exported, len(users)), users, strict=True))
    wanted = list(named) if outputs is None else list(outputs)
    if missing := [name for name in wanted if name not in named]:
        raise ValueError(
            f"{type(module).__name__} has no output {listing(missing)}; it has {listing([*named])}"
        )
    graph.outputs.clear()
    graph.outputs.extend(named[name] for name in wanted)
    expand(graph, opset=program.opset)
    clean(program)
    drop_unused_inputs(program)
    for value, name in zip(graph.outputs, wanted, strict=True):
        value.name = name
    program.name_values()
    program.import_domains()
    return program


def _name_dimensions(program: Program, names: Sequence[str]) -> None:
    """Gives symbolic sizes of the inputs these names, in all shapes."""
    renamed: dict[str, str] = {}
    for value in program.inputs():
        for name, dim in zip(names, value.shape or (), strict=False):
            symbol = None if isinstance(dim, int) else dim.value
            if symbol is not None and symbol.isidentifier() and name not in renamed.values():
                renamed.setdefault(symbol, name)
    if not renamed:
        return
    symbols = re.compile(rf"\b({'|'.join(renamed)})\b")
    inner = (value for node in program.graph.all_nodes() for value in node.outputs)
    for value in (*program.inputs(), *inner):
        if value.shape is not None:
            # A new one: those of constants cannot be changed.
            value.shape = ir.Shape(
                symbols.sub(lambda found: renamed[found[0]], dim.value)
                if not isinstance(dim, int) and dim.value is not None
                else dim
                for dim in value.shape
            )


def _output_names(exported: Exported, count: int) -> list[str]:
    """What the module calls its outputs: ``logits``, ``hidden_states.0``."""
    marks = [torch.empty(()) for _ in range(count)]
    names = {id(mark): name for name, mark in _named(exported.rebuild(marks), "")}
    return [names[id(mark)] for mark in marks]


def _named(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tensors of a result, each with the way to it."""
    if isinstance(tree, torch.Tensor):
        yield name or "output", tree
        return
    children: Any = ()
    if isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, tuple | list):
        children = zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    elif tree is not None and not isinstance(tree, bool | int | float | str):
        children = enumerate(pytree.tree_leaves(tree))
    for key, child in children:
        yield from _named(child, f"{name}.{key}" if name else str(key))


def _flat(result: Any) -> dict[str, torch.Tensor]:
    return dict(_named(result, ""))


def _difference(
    path: Path,
    samples: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, torch.Tensor]],
) -> float:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    taken = [value.name for value in session.get_inputs()]
    names = [value.name for value in session.get_outputs()]
    largest = 0.0
    for sample, answer in zip(samples, expected, strict=True):
        # An input that cannot change the answer is not an input of the file.
        given = _flat(sample)
        feeds = {name: given[name].cpu().numpy() for name in taken}
        try:
            results = session.run(names, feeds)
        except Exception as error:
            raise ParityError(
                f"the ONNX file does not run on {listing(_sizes(feeds), 12)}",
                because=str(error).strip().splitlines()[0],
                help=_FIRST,
            ) from error
        for name, found in zip(names, results, strict=True):
            wanted = answer[name].cpu().numpy()
            if found.shape != wanted.shape:
                raise ParityError(
                    f"the ONNX file gives {name}{[*found.shape]}, and PyTorch {[*wanted.shape]}",
                    because=f"the call has {listing(_sizes(feeds), 12)}",
                    help=_FIRST,
                )
            scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
            gap = np.abs(found.astype(np.float64) - wanted).max(initial=0.0)
            largest = max(largest, float(gap) / scale)
    return largest


def _sizes(feeds: Mapping[str, np.ndarray]) -> list[str]:
    return [f"{name}{[*array.shape]}" for name, array in feeds.items()]
