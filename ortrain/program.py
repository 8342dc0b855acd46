"""``Program``: an ONNX model and the roles of its inputs and outputs, the noun of all stages."""

from __future__ import annotations

from ortrain.extras import require

require("onnx", __name__)

import copy
import difflib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from ortrain.errors import GraphError, InputError
from ortrain.files import seal
from ortrain.graph.external_data import locate
from ortrain.graph.local_functions import with_functions, without_functions

ROLE = "ortrain.role"
TARGET = "ortrain.target"
PHASE = "ortrain.phase"
ORIGIN = "ortrain.origin"
REGION = "ortrain.region"
# The names of regions that ortrain makes begin so; others are checkpoints of the user's.
OWN_REGION = "attention "
CHECKS = "ortrain.checks"
WIDTH = "ortrain.width"


class Role(StrEnum):
    """What an input or output of a program is for."""

    # inputs
    PARAMETER = "parameter"
    BUFFER = "buffer"
    USER_INPUT = "user_input"
    SEED = "seed"
    OUTPUT_GRADIENT = "output_gradient"
    OPTIMIZER_STATE = "optimizer_state"
    HYPERPARAMETER = "hyperparameter"
    # outputs
    USER_OUTPUT = "user_output"
    LOSS = "loss"
    UPDATED_BUFFER = "updated_buffer"
    UPDATED_PARAMETER = "updated_parameter"
    UPDATED_STATE = "updated_state"
    CHECK = "check"  # bits of what does not hold for the values of a call
    # both: an output of one piece of a cut program, or of the training step, and an input of a
    # later one, or of the optimizer's
    SAVED = "saved"
    GRADIENT = "gradient"


class Phase(StrEnum):
    """Which part of a training step a node belongs to. No pass merges nodes of two phases."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


def role_of(value: ir.Value) -> Role | None:
    """The role of an input or output, None for a value inside the graph."""
    role = value.metadata_props.get(ROLE)
    return Role(role) if role else None


def set_role(value: ir.Value, role: Role, target: str = "") -> ir.Value:
    """Marks a value; ``target`` names what it belongs to (the buffer that an output updates)."""
    value.metadata_props[ROLE] = role.value
    if target:
        value.metadata_props[TARGET] = target
    return value


def target_of(value: ir.Value) -> str:
    """What the value belongs to: a gradient's parameter, an updated buffer's name; else its own."""
    return value.metadata_props.get(TARGET) or value.name or ""


def set_width(value: ir.Value, width: int) -> ir.Value:
    """Marks an output that nobody reads: of size 1 along its last axis, it stands for a width."""
    value.metadata_props[WIDTH] = str(width)
    return value


def width_of(value: ir.Value) -> int:
    """The width that an output stands for; 0 where it is what it is."""
    return int(value.metadata_props.get(WIDTH, 0))


@dataclass(frozen=True)
class Check:
    """What has to hold of the values of a call, for a graph to compute what the module does.

    Attributes:
        where: the module and line of the user's code, as far as capture knew them.
        because: what it is that does not hold.
    """

    where: str
    because: str


def note_checks(value: ir.Value, checks: Sequence[Check]) -> None:
    """Notes what the bits of an output stand for, the lowest first."""
    value.metadata_props[CHECKS] = json.dumps([[each.where, each.because] for each in checks])


def checks_of(value: ir.Value) -> tuple[Check, ...]:
    """What the bits of an output stand for."""
    noted = json.loads(value.metadata_props.get(CHECKS, "[]"))
    return tuple(Check(where, because) for where, because in noted)


def phase_of(node: ir.Node) -> Phase:
    """The phase of a node; forward where nothing is noted."""
    return Phase(node.metadata_props.get(PHASE, Phase.FORWARD))


def origin_of(node: ir.Node) -> str:
    """The user's module path and source line of a node, as far as capture knew them."""
    return node.metadata_props.get(ORIGIN, "")


def region_of(node: ir.Node) -> str:
    """The checkpointed region that a node is in, or whose gradient it computes; empty for none.

    Of what is inside such a region the forward keeps nothing for the backward.
    """
    return node.metadata_props.get(REGION, "")


def is_checkpointed(node: ir.Node) -> bool:
    """Whether a node is in a checkpoint of the user's, or computes a gradient of what is."""
    region = region_of(node)
    return bool(region) and not region.startswith(OWN_REGION)


class Program:
    """An ``onnx_ir`` model whose inputs and outputs have roles.

    Roles live in the values' metadata, so that they survive :meth:`save` and :meth:`load`.

    Args:
        model: the ONNX model. The program owns it: passes change it in place.
        aliases: output name → name of the input whose memory the output may take.
    """

    def __init__(self, model: ir.Model, aliases: dict[str, str] | None = None) -> None:
        self.model = model
        self.aliases = dict(aliases or {})

    @property
    def graph(self) -> ir.Graph:
        """The model's graph."""
        return self.model.graph

    @property
    def opset(self) -> int:
        """The opset of the standard domain."""
        return self.model.opset_imports[""]

    def inputs(self, *roles: Role) -> list[ir.Value]:
        """The inputs with one of the roles (all without an argument), in graph order."""
        return [v for v in self.graph.inputs if not roles or role_of(v) in roles]

    def outputs(self, *roles: Role) -> list[ir.Value]:
        """The outputs with one of the roles (all without an argument), in graph order."""
        return [v for v in self.graph.outputs if not roles or role_of(v) in roles]

    def input(self, name: str) -> ir.Value:
        """The input of that name.

        Raises:
            GraphError: there is none.
        """
        return self.named([name])[0]

    def named(self, names: Iterable[str]) -> list[ir.Value]:
        """The inputs of these names, in their order.

        Raises:
            GraphError: one of them is not there.
        """
        known = {value.name: value for value in self.graph.inputs}
        try:
            return [known[name] for name in names]
        except KeyError as error:
            raise GraphError(f"the program has no input {error.args[0]!r}") from None

    def operators(self) -> Counter[str]:
        """How often each operator occurs, ``domain::`` prefixed outside the standard domain."""
        return Counter(
            n.op_type if not n.domain else f"{n.domain}::{n.op_type}"
            for n in self.graph.all_nodes()
        )

    def clone(self) -> Program:
        """An independent copy (constants are shared)."""
        model = self.model.clone()
        nodes = (v for n in model.graph.all_nodes() for v in n.outputs)
        for value in (*model.graph.inputs, *model.graph.initializers.values(), *nodes):
            # onnx_ir's clone shares the type objects, which setting a dtype changes in place.
            value.type = copy.copy(value.type)
        return Program(model, self.aliases)

    def text(self) -> str:
        """The program as ONNX text."""
        return onnx.printer.to_text(ir.to_proto(self.model))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        roles = Counter(str(role_of(v)) for v in self.graph.inputs)
        listed = ", ".join(f"{count} {role}" for role, count in roles.items())
        return f"Program({len(self.graph)} nodes, opset {self.opset}; {listed})"

    def diff(self, other: Program) -> str:
        """A unified diff of the two programs' texts; empty where they are the same."""
        lines = difflib.unified_diff(
            self.text().splitlines(), other.text().splitlines(), "self", "other", lineterm="", n=2
        )
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str], external_data_above: int = 1 << 26) -> None:
        """Writes an ONNX file, in which operators of ortrain's have functions.

        Initializers of more than ``external_data_above`` bytes in all go into ``<name>.data``: a
        protobuf holds at most 2 GiB. The file is sealed: see :mod:`ortrain.files.seal`.
        """
        target = Path(path)
        size = sum(v.const_value.nbytes for v in self.graph.initializers.values() if v.const_value)
        external = f"{target.name}.data" if size > external_data_above else None
        metadata = self.model.metadata_props
        before = metadata.pop(seal.KEY, None)
        try:
            if external is not None:
                metadata[seal.DATA_KEY] = seal.unsealed_data(external)
            ir.save(with_functions(self.model), target, external_data=external)
        finally:
            metadata.pop(seal.DATA_KEY, None)
            if before is not None:
                metadata[seal.KEY] = before
        seal.seal_model(target, None if external is None else target.with_name(external))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Program:
        """Reads what :meth:`save` wrote (or any ONNX file, whose values then have no roles).

        Raises:
            InputError: the file is no ONNX model, or it has a seal and is damaged.
            OSError: it cannot be read.
        """
        seal.is_model_whole(path, f"model {os.fspath(path)}")
        try:
            program = cls(ir.load(path))
            locate(program.model, Path(path))
        except (InputError, OSError):
            raise
        except Exception as error:
            # Of protobuf, onnx or onnx_ir, by the place at which it is damaged.
            raise _unreadable(path, str(error) or type(error).__name__) from error
        if not len(program.graph) and not program.graph.outputs:
            raise _unreadable(path, "it has no graph")  # nothing at all is a message, too
        for key in (seal.KEY, seal.DATA_KEY):
            program.model.metadata_props.pop(key, None)
        without_functions(program.model)
        return program

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Program:
        """Reads what :meth:`serialize` returned."""
        return cls(ir.from_proto(onnx.ModelProto.FromString(data)))

    def import_domains(self) -> None:
        """Has the model import the domains of its nodes, and no others: ONNX knows no more."""
        used = {node.domain for node in self.graph.all_nodes()} | {""}
        for domain in set(self.model.opset_imports) - used:
            del self.model.opset_imports[domain]
        for domain in sorted(used):
            self.model.opset_imports.setdefault(domain, 1)

    def name_values(self) -> None:
        """Gives every value a name of its own; inputs and outputs keep theirs."""
        NameFixPass()(self.model)

    def serialize(self) -> bytes:
        """The model as protobuf bytes.

        Raises:
            GraphError: it is larger than protobuf's 2 GiB.
        """
        try:
            return ir.to_proto(self.model).SerializeToString()
        except ValueError as error:
            raise GraphError(
                "the graph with its constants is larger than 2 GiB",
                help="keep weights as inputs, or save with external data",
            ) from error


def _unreadable(path: str | os.PathLike[str], because: str) -> InputError:
    return InputError(
        f"cannot read the model {os.fspath(path)}",
        because=because,
        help="it is cut off or no ONNX file: take a whole copy of it, or make it anew",
    )
