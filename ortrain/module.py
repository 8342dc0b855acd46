"""``ORTModule``: a module whose forward and backward run as ONNX graphs."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import contextlib
import copy
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ortrain.assigned_forward import Entry, fits, is_bound_to, watched
from ortrain.config import DebugOptions, LogLevel, Options
from ortrain.errors import OrtrainWarning, warn_caller
from ortrain.frontend.machine import Machine
from ortrain.json_config import settings_from_environment
from ortrain.kinds import NONE, expect
from ortrain.methods import Methods
from ortrain.pytorch import pytree
from ortrain.pytorch.backwards import profiled
from ortrain.runtime.reduced import reduced_products_asked_for
from ortrain.step.ranges import marked
from ortrain.step.report import Report
from ortrain.variables import warn_of_variables

_BETWEEN = "PyTorch runs what is no graph, and graphs lie before and behind that"

# The module's own dictionaries, not copies: whatever walks, moves, casts or replaces parameters
# does so in the module itself, under its own names.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# What ORTModule has for itself, its hooks above all. Every other attribute is the module's.
_OWN = frozenset(nn.Module().__dict__) - {*_SHARED, "training"}
# Where a library wraps `forward`, as accelerate does for autocast, it wraps ORTModule's; the mark
# that it has done so is not the module's either, of which there may be another ORTModule.
_FORWARD = frozenset({"forward", "_original_forward", "_is_accelerate_prepared"})


# The methods that every module has, of which ORTModule does not have its own.
_METHODS = tuple(
    name
    for name, value in vars(nn.Module).items()
    if callable(value) and not name.startswith("_") and name != "forward"
)


# Classes that libraries of trainers ask a model for, by the file that has them.
_ASKED_FOR = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ORTModule(nn.Module):
    """Wraps a module so that it trains through its own ONNX graph on the stock onnxruntime.

    ::

        model = ORTModule(model)

    Nothing else changes: parameters, buffers, ``state_dict`` keys and attributes are the module's
    own, and its outputs come back as the same types. The first forward captures the module; what
    cannot be captured runs in PyTorch, with one warning and the reason in :attr:`report`.

    Args:
        module: the module to train. It is shared, not copied.
        debug_options: logging, and graphs written as ONNX files.
        options: engine, fallback, execution provider and the rest.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or the settings are none.
    """

    def __init__(
        self,
        module: nn.Module,
        debug_options: DebugOptions | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        expect("module", module, nn.Module, "a torch.nn.Module, which ORTModule wraps")
        expect_options(debug_options, options)
        if isinstance(module, ORTModule):
            module = module.module
        super().__init__()
        own = self.__dict__
        own["_original"] = module
        options, debug_options = options or Options(), debug_options or DebugOptions()
        if (settings := settings_from_environment()) is not None:
            options, debug_options = settings.applied(options, debug_options)
            settings.tell()
        own["_options"], own["_debug_options"] = options, debug_options
        if debug_options.log_level <= LogLevel.WARNING:
            warn_of_variables()
            for name in ("parts", "custom_autograd"):
                if not getattr(options, name):
                    warn_caller(f"Options({name}=False) has no effect: {_BETWEEN}")
        own["_runner"] = Machine(module, own["_options"], own["_debug_options"])
        own["_methods"] = Methods(self, module, own["_runner"].aside)
        for name in _SHARED:
            own[name] = module.__dict__[name]
        del own["training"]
        # With the module's signature, by which trainers choose the columns of a data set.
        with contextlib.suppress(TypeError, ValueError):  # some callables written in C have none
            own["__signature__"] = inspect.signature(module.forward)
        if type(self).forward is ORTModule.forward:
            own["_entries"] = [_entry(own["_runner"])]
            own["forward"] = own["_entries"][0].function
        # Methods of nn.Module that the module's class has made its own are its own here too.
        for name in _METHODS:
            if _overrides(type(module), name) and not _overrides(type(self), name):
                own[name] = _passing_on(self, name)
        own["_never_called"] = weakref.finalize(self, _tell_if_never_called, own["_runner"])
        if any(p.grad is not None for p in module.parameters()):
            own["_never_called"].detach()  # they would be no sign

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; same arguments, same results."""
        return _call(self.__dict__["_runner"], args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        original: nn.Module = self.__dict__["_original"]
        return original

    @property
    def report(self) -> Report:
        """What ran where, and why; complete after the first forward."""
        report: Report = self.__dict__["_runner"].report
        return report

    @property
    def options(self) -> Options:
        """The settings. New ones hold from the next call on, which captures anew."""
        options: Options = self.__dict__["_options"]
        return options

    @options.setter
    def options(self, options: Options) -> None:
        expect_options(None, options)
        self.__dict__["_options"] = options
        self._runner.use(options)

    def _show(self, debug_options: DebugOptions) -> None:
        """Takes other settings of what is shown, which hold from the next call on."""
        self.__dict__["_debug_options"] = debug_options
        runner: Machine = self.__dict__["_runner"]
        runner.show(debug_options)

    @property
    def steps_to_come(self) -> int | None:
        """How many forwards with gradients are to come, where somebody knows; settable.

        With ``engine="auto"`` a graph is made once it is likely to save more time than it costs.
        Unless this says how long a run is, it is taken that it will last as long as it has lasted.
        """
        steps: int | None = self._runner.prospect.steps
        return steps

    @steps_to_come.setter
    def steps_to_come(self, steps: int | None) -> None:
        self._runner.expect(steps)

    @property
    def only_loss_is_read(self) -> bool:
        """Whether of the outputs nobody reads more than a loss in the first place; settable.

        Then graphs do no work on tokens without a label, and logits of a large vocabulary are there
        for some rows at a time. Of logits that nobody reads there are zeros. A loss is a
        floating-point scalar; where there is none, it changes nothing. ORTTrainer says so of
        training steps with Trainer's own `compute_loss`.
        """
        only: bool = self._runner.only_loss
        return only

    @only_loss_is_read.setter
    def only_loss_is_read(self, only: bool) -> None:
        self._runner.only_loss = only

    @property
    def __class__(self) -> type:
        """That of the module where it is one of transformers or peft, whose trainers ask for it.

        They save, look for labels and a loss, and find the model within an adapter's, as the class
        says; ``type(model)`` is ORTModule, and ``isinstance(model, ORTModule)`` is true as well.
        """
        module = self.__dict__["_original"]
        asked_for = (
            getattr(sys.modules.get(package), name, None) for package, name in _ASKED_FOR.items()
        )
        own = any(isinstance(kind, type) and isinstance(module, kind) for kind in asked_for)
        return type(module) if own else type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Takes a class that a library has made of its own, as ``fully_shard`` does."""
        told, own = self.__class__, type(self)
        if told is not own and not issubclass(kind, own):  # it was made of what the class says
            bases = tuple(own if base is told else base for base in kind.__bases__)
            # Without what each class makes itself.
            members = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
            kind = type(kind.__name__, bases, members)
        vars(object)["__class__"].__set__(self, kind)

    def _get_name(self) -> str:
        return type(self).__name__

    # -- everything else is the module's own -------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            methods: Methods = self.__dict__["_methods"]
        except KeyError:
            raise AttributeError(name) from None
        return methods.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self._take_forward(value)
        elif name in _OWN or name in _FORWARD:
            self.__dict__[name] = value
        elif name in _SHARED:
            self.__dict__[name] = self.module.__dict__[name] = value
        elif name == "__class__" or (
            _is_settable(type(self), name) and (name != "options" or isinstance(value, Options))
        ):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["_original"], name, value)

    def __delattr__(self, name: str) -> None:
        if name == "forward" and "_entries" in self.__dict__:
            self._take_forward(self.__dict__["_entries"][0].function)
        elif name in _FORWARD and name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self.__dict__["_original"], name)

    def _take_forward(self, forward: Any) -> None:
        """Puts another forward in place; see :mod:`ortrain.assigned_forward`."""
        entries: list[Entry] = self.__dict__.get("_entries", [])
        # accelerate binds what it takes off its wrappers again, as if it were the class's function.
        found = getattr(forward, "__func__", None)
        if any(found is each.function for each in entries):
            forward = found
        if any(forward is each.function for each in entries):  # one that was in place before
            while entries[-1].function is not forward:
                entries.pop()
                entries[-1].give_back(self.module)
        elif entries and is_bound_to(forward, self):
            function = forward.__func__
            if fits(function, ORTModule, self.module):
                forward = MethodType(watched(function, entries[-1], ORTModule._adopt), self)
        self.__dict__["forward"] = forward

    def _adopt(self, function: FunctionType) -> None:
        """Makes a function the module's own forward."""
        entries: list[Entry] = self.__dict__["_entries"]
        entries[-1].give_way(self.module, function)
        entries.append(_entry(self.__dict__["_runner"]))
        self.__dict__["forward"] = entries[-1].function

    def __getitem__(self, index: Any) -> Any:
        return self.__dict__["_original"][index]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__dict__["_original"])})

    def train(self, mode: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Sets the module's mode; takes what the module's own ``train`` takes."""
        return self._itself_for(self.module.train(mode, *args, **kwargs))

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Sets the module's mode; takes what the module's own ``eval`` takes."""
        return self._itself_for(self.module.eval(*args, **kwargs))

    def _itself_for(self, result: Any) -> Any:
        """ORTModule where the module has returned itself."""
        return self if result is self.module else result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, with its key names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, with its key names."""
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._save_to_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> ORTModule:
        self.module._apply(*args, **kwargs)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> ORTModule:
        """Calls ``fn`` with every sub-module and with the module."""
        self.module.apply(fn)
        return self

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's own children."""
        return self.module.named_children()

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Registers a buffer of the module."""
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        """Registers a parameter of the module."""
        self.module.register_parameter(*args, **kwargs)

    def extra_repr(self) -> str:
        """The module's class, and what runs it."""
        return f"{type(self.module).__name__}, {self.report.mode or 'not called yet'}"

    # -- copies ------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        settings = self._debug_options.plain(), self._options.plain()
        return _rebuild, (type(self), self.module, *settings), self._hooks() or None

    def __copy__(self) -> ORTModule:
        result = type(self)(copy.copy(self.module), self._debug_options, options=self._options)
        result.__dict__.update({name: copy.copy(value) for name, value in self._hooks().items()})
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        result = type(self)(
            copy.deepcopy(self.module, memo), self._debug_options, options=self._options
        )
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self._hooks(), memo))
        return result

    def _hooks(self) -> dict[str, Any]:
        """The hooks on ORTModule itself."""
        return {name: value for name in _OWN if (value := self.__dict__[name])}


def _entry(runner: Machine) -> Entry:
    def is_part() -> bool:
        from ortrain.frontend.compiled import is_ours

        return runner.options.precision is None and is_ours()

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            # torch.compile around ORTModule would trace the runner, and capture and build with it.
            return torch.compiler.disable(_call)(runner, args, kwargs)
        return _call(runner, args, kwargs)

    return Entry(runner.module, run, is_part)


def _call(runner: Machine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call, in the precision that is asked for, as a range of the profile if one is made."""
    if runner.options.precision is None and not profiled():
        return runner(args, kwargs)
    with marked("forward"), autocast_of(runner.options, runner.module, args, kwargs):
        return runner(args, kwargs)


def autocast_of(
    options: Options, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[Any]:
    """What is around a call for the precision that the options ask for."""
    if options.precision is None:
        return contextlib.nullcontext()
    if options.precision == "bf16-products":
        return reduced_products_asked_for()
    held = chain(module.parameters(), pytree.tree_leaves((args, kwargs)))
    device = next((t.device.type for t in held if isinstance(t, torch.Tensor)), "cpu")
    return torch.autocast(device, _DTYPES[options.precision])


def _rebuild(
    kind: type[ORTModule], module: nn.Module, debug_options: dict[str, Any], options: dict[str, Any]
) -> ORTModule:
    return kind(module, DebugOptions.of(debug_options), options=Options.of(options))


# With ``weights_only=True`` a file with an ORTModule loads where one with the module itself does.
torch.serialization.add_safe_globals([_rebuild, ORTModule])


def _is_settable(kind: type[ORTModule], name: str) -> bool:
    """Whether a name is a property that can be set, of ORTModule or of a class derived from it."""
    own = getattr(kind, name, None)
    return isinstance(own, property) and own.fset is not None


def _overrides(kind: type[nn.Module], name: str) -> bool:
    return getattr(kind, name) is not getattr(nn.Module, name)


def _passing_on(wrapper: ORTModule, name: str) -> Callable[..., Any]:
    """The method of the wrapped module, which returns the wrapper in its place."""
    reference = weakref.ref(wrapper)

    @functools.wraps(getattr(wrapper.module, name))
    def method(*args: Any, **kwargs: Any) -> Any:
        own = reference()
        assert own is not None
        return own._itself_for(getattr(own.module, name)(*args, **kwargs))

    return method


def _tell_if_never_called(runner: Machine) -> None:
    """Warns where a module has gradients that no call of its wrapper has made."""
    if runner.calls or runner.debug_options.log_level > LogLevel.WARNING:
        return
    if any(parameter.grad is not None for parameter in runner.module.parameters()):
        name = type(runner.module).__name__
        warnings.warn(
            f"ORTModule around {name} was never called, and {name} was trained: in PyTorch, since "
            "the script calls the module itself; call what ORTModule(…) returns",
            OrtrainWarning,
            stacklevel=2,
        )


def expect_options(debug_options: object, options: object) -> None:
    """Raises TypeError where the settings of an ORTModule are none, or in each other's place."""
    for name, value, kind, other in (
        ("debug_options", debug_options, DebugOptions, "options"),
        ("options", options, Options, "debug_options"),
    ):
        swapped = isinstance(value, Options | DebugOptions)
        hint = f"write {other}={type(value).__name__}(…)" if swapped else ""
        expect(
            name, value, (kind, NONE), f"{'an' if kind is Options else 'a'} {kind.__name__}", hint
        )


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside an ORTModule; any other module itself."""
    return module.module if isinstance(module, ORTModule) else module


__all__ = ["ORTModule", "unwrap"]
