"""``Training``: what the trainers of both generations are made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import distributed, nn

from ortrain.classic.description import Descriptions
from ortrain.classic.graphs import GraphModule, Postprocess, of_model, postprocessed, written
from ortrain.classic.modules import ByName, WithLoss, takes_names
from ortrain.classic.ranks import expect_group
from ortrain.classic.states import States, ready_states, ready_weights, states_of
from ortrain.classic.stepping import Attributes, Stepper, device_of, pipeline, trained
from ortrain.classic.updates import Update, grouped
from ortrain.config import Options
from ortrain.deploy.export import export_onnx
from ortrain.errors import InputError, StateError
from ortrain.files.replacing import staged
from ortrain.module import ORTModule, unwrap
from ortrain.program import Program
from ortrain.step.report import Report


class Training:
    """A model, its loss, its optimizer and the processes that train it.

    Args:
        model: a torch module, or an ONNX model that has its loss.
        loss_fn: takes the model's result and the label, the last input; None where the model
            returns its loss.
        descriptions: of inputs and outputs.
        optimizer: name of the optimizer.
        attributes: of a parameter, by its name.
        device: to train on; the model is moved there.
        accumulation: steps for each update.
        rank: of this process.
        world: how many processes train together.
        clip: whether gradients are scaled down by their norm.
        mixed: in mixed precision.
        zero: stage of ZeRO: 0, or 1 for moments that are kept by one process each.
        frozen: names of weights that are not trained.
        deterministic: whether two runs have to be equal.
        opset: of graphs; None for the pipeline's.
        postprocess: changes the ONNX model that the steps are made of, or returns another one.
        strict_names: described inputs have to have the names of ``forward``.
        options: of the pipeline.

    Raises:
        InputError: what is said of the model is not so, or is not served. Nothing has changed then.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any] | None,
        descriptions: Descriptions,
        optimizer: str,
        attributes: Attributes,
        *,
        device: str | torch.device,
        accumulation: int = 1,
        rank: int = 0,
        world: int = 1,
        clip: bool = True,
        mixed: bool = False,
        zero: int = 0,
        frozen: Sequence[str] = (),
        deterministic: bool = False,
        opset: int | None = None,
        postprocess: Postprocess | None = None,
        strict_names: bool = True,
        options: Options | None = None,
    ) -> None:
        own_device = device_of(device)
        expect_group(rank, world)
        if zero not in (0, 1):
            raise InputError(f"ZeRO of stage {zero}: 0 and 1 are served")
        settings = pipeline(
            options, own_device, mixed=mixed, deterministic=deterministic, opset=opset
        )
        self.descriptions, self.device, self.mixed = descriptions, own_device, mixed
        self.partitioned = bool(zero) and distributed.is_initialized()
        if isinstance(model, nn.Module):
            model = unwrap(model)
            inner: WithLoss | GraphModule = self._with_loss(model, loss_fn, strict_names)
            if postprocess is not None and settings.precision is not None:
                raise InputError(
                    "a graph of a function of the script's own is trained in float32",
                    because="mixed precision is PyTorch's autocast",
                    help="leave out mixed precision, or the function",
                )
        elif isinstance(model, onnx.ModelProto):
            if loss_fn is not None:
                raise InputError(
                    "loss_fn is given with an ONNX model, which has its loss",
                    help="leave loss_fn out, and describe the model's loss as an output",
                )
            if mixed:
                raise InputError(
                    "an ONNX model is trained in the dtypes that it has",
                    because="mixed precision is PyTorch's autocast",
                    help="give the torch module that the model was exported of",
                )
            if postprocess is not None:
                model = written(postprocess, model)
            inner = of_model(model, descriptions, frozen, own_device, settings)
        else:
            raise InputError(
                f"model is a {type(model).__name__}: expected a torch.nn.Module or an "
                "onnx.ModelProto"
            )
        self.model, self.loss_fn, self._inner = model, loss_fn, inner
        named = self._parameters()
        parameters = trained(named, frozen, [*self.weights])
        rows = grouped(optimizer, parameters, attributes)
        # Nothing is refused from here on.
        for name, parameter in named.items():
            parameter.requires_grad_(name in parameters)
        inner.to(own_device)
        self.module: nn.Module = inner
        if isinstance(inner, WithLoss):
            self.module = ORTModule(inner, options=settings)
            if postprocess is not None:
                held = {**dict(model.named_buffers()), **self.weights}
                self.module = postprocessed(inner, descriptions, held, postprocess, settings)
        self.stepper = Stepper(
            self.module,
            descriptions,
            Update(optimizer, parameters, rows, clip=clip, partitioned=self.partitioned),
            device=own_device,
            accumulation=accumulation,
            has_label=loss_fn is not None,
            deterministic=deterministic,
            mixed=mixed,
        )

    def _with_loss(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, strict_names: bool
    ) -> WithLoss:
        """The model with its loss, as it is described.

        Raises:
            InputError: it is not.
        """
        described = self.descriptions
        if loss_fn is not None and described.loss != 0:
            raise InputError(
                f"the loss {described.results[described.loss]!r} is described behind other outputs",
                because="with a loss function the outputs are its loss, then the model's",
                help="describe the loss first",
            )
        if loss_fn is not None and len(described.inputs) < 2:
            raise InputError("a loss function needs a label", help="describe it as the last input")
        by_name = takes_names(model, described.names, loss_fn is not None, strict=strict_names)
        return WithLoss(model, loss_fn, described, by_name)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """All parameters, each by one name."""
        if isinstance(self._inner, GraphModule):
            held = self._inner.held.items()
            return {name: tensor for name, tensor in held if isinstance(tensor, nn.Parameter)}
        found = dict(self.model.named_parameters())
        if isinstance(self.loss_fn, nn.Module):
            found |= {f"loss_fn.{name}": p for name, p in self.loss_fn.named_parameters()}
        return found

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weights and buffers, by all names that they have."""
        if isinstance(self._inner, GraphModule):
            return self._inner.held
        found = dict(self.model.state_dict(keep_vars=True))
        if isinstance(self.loss_fn, nn.Module):
            inner = self.loss_fn.state_dict(keep_vars=True)
            found |= {f"loss_fn.{name}": tensor for name, tensor in inner.items()}
        return found

    @property
    def report(self) -> Report | None:
        """What ran where, and why; None of a graph that was given or changed."""
        return self.module.report if isinstance(self.module, ORTModule) else None

    # -- states --------------------------------------------------------------------------------

    def states(self) -> States:
        """Of the optimizer, of this process' share of the parameters."""
        return states_of(self.stepper.update)

    def load(
        self, weights: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]], *, strict: bool
    ) -> None:
        """Takes over weights, and states unless there are none.

        Raises:
            InputError: they are not those of this training; nothing has changed then.
        """
        takes = [ready_weights(self.weights, weights, strict=strict)]
        if states:
            takes.append(ready_states(self.stepper.update, states, strict=strict))
        for take in takes:
            take()
        self.stepper.begin()

    def save_as_onnx(self, path: str | os.PathLike[str], opset: int | None = None) -> None:
        """Writes the model with its loss as an ONNX file, compared with PyTorch before it is kept.

        An ONNX model that was given is written with the weights that it has now.

        Raises:
            StateError: no step has run, so that no graph is known.
            ParityError: the file answers otherwise than the model.
            SaveError: it could not be written.
        """
        if isinstance(self.module, GraphModule):
            self.module.save(path, self.stepper.sample)
            return
        if self.stepper.sample is None:
            raise StateError(
                "save_as_onnx was called before a step has run",
                because="the graph is made of a call's inputs",
                help="call train_step or eval_step once",
            )
        desc, target = self.stepper.descriptions, Path(path)
        with staged(target.parent, target.name, "ONNX file") as folder:
            export_onnx(
                ByName(self._inner, desc),
                [dict(zip(desc.names, self.stepper.sample, strict=True))],
                folder / target.name,
                outputs=desc.results,
                opset=max(18, opset or 21),
            )
            program = Program.load(folder / target.name)
            _rename(program, desc)
            program.save(folder / target.name)


def _rename(program: Program, descriptions: Descriptions) -> None:
    """Gives weights the model's names and inputs the described sizes, in place."""
    graph = program.graph
    for name in list(graph.initializers):
        own = name.removeprefix("module.").removeprefix("model.")
        if name.startswith("module.") and own not in graph.initializers:
            value = graph.initializers.pop(name)
            value.name = own
            graph.register_initializer(value)
    sizes: dict[str, int | str] = {}
    entries = {entry.name: entry for entry in descriptions.inputs}
    for value in graph.inputs:
        for size, dim in zip(entries[value.name or ""].shape, value.shape or (), strict=False):
            if not isinstance(dim, int) and dim.value is not None:
                sizes.setdefault(dim.value, size)
    inner = (value for node in graph.all_nodes() for value in node.outputs)
    for value in (*graph.inputs, *inner):
        if value.shape is not None:
            value.shape = ir.Shape(_renamed(dim, sizes) for dim in value.shape)


def _renamed(dim: int | ir.SymbolicDim, sizes: Mapping[str, int | str]) -> int | str | None:
    """A size as it is described; an expression of such sizes is left open."""
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return sizes.get(dim.value, dim.value if dim.value.isidentifier() else None)


__all__ = ["Training"]
