"""Why a call runs in PyTorch whatever its code is: what no graph serves."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import checkpoint

from ortrain.config import EXECUTORS, Options
from ortrain.errors import CaptureError, NotServed
from ortrain.guards.guard import Ambient, inner_hooks
from ortrain.guards.structure import FlatCall
from ortrain.program import Role
from ortrain.runtime import engines
from ortrain.step.forms import CallForm, CompiledCapture, ModuleState
from ortrain.step.places import device_of

_transforms = torch._C._functorch.peek_interpreter_stack

# Why a call runs in PyTorch that checkpointing may run again.
RUN_AGAIN = "checkpointing around it runs it twice, and both times must be alike"

# Why a call runs in PyTorch whose tensors have no elements; those that have run as a graph.
EMPTY = NotServed(
    "a tensor of the call is empty, and ONNX reads a 0 in a shape as the size of another tensor"
)
# Why calls run in PyTorch whose numbers change and cannot be inputs.
NUMBERS_CHANGE = (
    "its code needs a number among the arguments itself, which changes from call to call; "
    "pass it as a tensor, and choose with torch.where"
)

_BY_ATEN = 'engine="aten" serves it'

PROVIDERS = {"cpu": "CPUExecutionProvider"}
# Hooks on saved tensors that give back what they were given: checkpointing, save_on_cpu.
_KEEPING = ("", checkpoint.__name__, torch.autograd.graph.__name__)


def borrowed(module: nn.Module) -> str:
    """Why the module's parameters are its own for this call only; empty where they are not.

    They are never kept for other calls: each would be a new state of the module.
    """
    if _transforms() is not None:
        return "a torch function mode or transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are taken around it"
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, nn.Parameter):
            return f"{name} is not a parameter but computed, as torch.func.functional_call sets it"
    return ""


def not_served(
    module: nn.Module, options: Options, state: ModuleState, modes: Ambient, flat: FlatCall
) -> str:
    """Why no graph can serve calls under these modes; empty where one can.

    Args:
        module: that is called.
        options: its settings.
        state: that the module is in.
        modes: around the call.
        flat: the call.
    """
    if modes.deterministic and options.provider not in (None, "CPUExecutionProvider"):
        return "deterministic algorithms are asked for"
    if modes.function_modes or modes.dispatch_modes or modes.transformed:
        return "a torch function mode or transform is active"
    if modes.tangents:
        return "forward-mode derivatives are taken around it"
    if modes.saving not in _KEEPING and modes.grad:
        return "hooks are set on saved tensors, of which a graph has others than PyTorch"
    if modes.parametrizations_cached and any(map(parametrize.is_parametrized, module.modules())):
        return "parametrize.cached() is around it, and a graph computes parametrized tensors afresh"
    inputs = {f"an input of shape {[*t.shape]}": t for t in flat.tensors}
    engine = options.engine_for(modes.grad)
    device = device_of(flat, state.tensors)
    for kind, dtype in modes.autocast or ():
        if kind == device.type and not _executor_serves(options, {dtype}, modes, device):
            return f"autocast is on: mixed precision is not served by onnxruntime; {_BY_ATEN}"
    for name, tensor in {**state.tensors, **inputs}.items():
        by_aten = (
            tensor.device.type == "cuda"
            and engine in ("aten", "auto")
            and _executor_serves(options, {tensor.dtype}, modes, tensor.device)
        )
        if tensor.device.type not in PROVIDERS and not by_aten:
            if options.provider is None:
                why = f"{name} is on {tensor.device}, for which there is no execution provider"
                return f"{why}; {_BY_ATEN}" if tensor.device.type == "cuda" else why
            # Its outputs would come back on the CPU.
            return f"{name} is on {tensor.device}, and graphs take tensors of the CPU"
        if not _executor_serves(options, {tensor.dtype}, modes, device):
            wanted = f"reduced precision is not served by onnxruntime; {_BY_ATEN}"
            return f"{name} is {tensor.dtype}: {wanted}"
        if tensor.layout is not torch.strided:
            return f"{name} is {tensor.layout}"
        if hasattr(tensor, "ds_status"):
            return (
                f"{name} is partitioned by DeepSpeed ZeRO stage 3, which gathers it for the "
                "modules that it calls; stages 1 and 2 leave parameters whole"
            )
    return inner_hooks(module) or ""


def tried(
    options: Options, device: torch.device, dtypes: Collection[torch.dtype]
) -> tuple[str, ...]:
    """The engines that a contest may be about, under some settings."""
    recorded = bool(options.cuda_graphs)
    return engines.candidates(device, dtypes, options.provider, cuda_graphs=recorded)


def _executor_serves(
    options: Options, dtypes: Collection[torch.dtype], modes: Ambient, device: torch.device
) -> bool:
    """Whether an executor that may run a call has kernels for these dtypes."""
    engine = options.engine_for(modes.grad)
    if engine == "auto":
        return bool(tried(options, device, dtypes))
    return engines.serves(engine, dtypes)


def runs_again(options: Options, modes: Ambient) -> bool:
    """Whether a call belongs to a forward that runs twice, and may meet two engines.

    What is saved in the first of them must be what is saved in the second, and so must be the
    masks of dropout.
    """
    chosen = {options.engine_for(grad) for grad in (True, False)}
    if len(chosen) == 1 and chosen <= EXECUTORS:
        return False
    return modes.grad and (modes.in_backward or modes.saving == checkpoint.__name__)


def draws_apart(
    module: nn.Module, options: Options, form: CallForm, served: CompiledCapture
) -> bool:
    """Whether a call without gradients draws random numbers that a call with them draws again.

    So does checkpointing with reentrance; the two calls have forms of their own.
    """
    chosen = {options.engine_for(grad) for grad in (True, False)}
    drawn = served.captured.program.inputs(Role.SEED)
    alike = len(chosen) == 1 and chosen <= EXECUTORS
    return bool(drawn and not form.grad and module.training and not alike)


def returns_views(part: nn.Module) -> CaptureError:
    """Why a part that returns a view is no graph: the code around it may write to it."""
    return CaptureError(
        f"{type(part).__name__} returns a view of one of its tensors",
        because="a graph returns a copy, and a write to it would not reach that tensor",
        help="none is needed: the parts below it can be graphs",
    )


def dtypes_of(state: ModuleState, modes: Ambient, flat: FlatCall) -> set[torch.dtype]:
    """Of a call's tensors and the module's, and what autocast casts them to."""
    device = device_of(flat, state.tensors)
    cast = {dtype for kind, dtype in modes.autocast or () if kind == device.type}
    return cast | {t.dtype for t in (*state.tensors.values(), *flat.tensors)}
