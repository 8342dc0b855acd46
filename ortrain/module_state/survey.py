"""Everything that a module's ``forward`` may read or write: what a capture of it has frozen.

What a module's state is, is defined here and nowhere else. A `Survey` walks it once, completely and
slowly (10 ms for BERT-base), and yields two views of it: *facts*, which can be compared one
by one, and *holders*, the places that hold it, which can be put back. `Guard` keeps a survey and
makes another when it has seen a difference; `untouched` puts back what a trace has changed.

Reached are, from the module: its sub-modules, attributes, slots, the containers and objects in them
to any depth, the classes of all these, functions and what they close over, partial and bound
functions, and the globals that code in reach names (`reach`). Not reached are the insides of
libraries: their functions' globals, and objects of theirs that hold no configuration.

What is reached and can neither be compared nor put back (an iterator, a lock, an object of another
language) is listed as `unwatched` where code in reach names it.
"""

from __future__ import annotations

import datetime as dt
import functools
import gc
import os
import random
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import cached_property, partial, partialmethod
from itertools import chain
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from ortrain.module_state import reach
from ortrain.module_state.fact import Fact, Key, constant_state, tensor_fact, value_fact
from ortrain.module_state.holder import (
    Attributes,
    Closure,
    Elements,
    Globals,
    Holder,
    Memo,
    Namespace,
    Signature,
    Slots,
    cell_value,
    container,
    reader,
    slot_value,
    slots_of,
)
from ortrain.module_state.hooks import HOOK_FLAGS, HOOKS, watched_hooks, weighed_attributes
from ortrain.module_state.memo import memo_state
from ortrain.module_state.scope import (
    is_apart,
    is_constant,
    is_foreign,
    is_library,
    is_plain,
    package,
)
from ortrain.module_state.value import (
    ABSENT,
    MIXED,
    SEQUENCES,
    elements,
    entries,
    frozen,
    own_attributes,
    short,
)

# No forward reads these.
UNWATCHED = {
    *HOOKS,
    *HOOK_FLAGS,
    "_is_full_backward_hook",
    "_is_hf_initialized",
    "_output_capturing_hooks_installed",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_parameters",
    "_buffers",
    "_modules",
}
# transformers' settings of generate(), which Seq2SeqTrainer changes between two calls of a model.
_SETTINGS = ("generation_config", "GenerationConfig")

# What the code reads of a tensor that depends on which parameters are trained.
_TRAINABLE = {"requires_grad", "grad_fn", "is_leaf"}
# What a forward may ask PyTorch for, but for what `guards.guard.ambient` has.
_SETTINGS_OF_TORCH: dict[str, Callable[[], Hashable]] = {
    ask.__name__: ask
    for ask in (
        torch.get_default_device,
        torch.get_deterministic_debug_mode,
        torch.get_float32_matmul_precision,
        torch.get_num_interop_threads,
        torch.get_num_threads,
        torch.initial_seed,
        torch.is_anomaly_check_nan_enabled,
        torch.is_anomaly_enabled,
        torch.is_autocast_cache_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
        torch.is_warn_always_enabled,
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
    )
}
_CUDNN: Any = torch.backends.cudnn
_SETTINGS_OF_TORCH |= {
    "allow_tf32": lambda: (torch.backends.cuda.matmul.allow_tf32, _CUDNN.allow_tf32),
    "cudnn": lambda: (_CUDNN.enabled, _CUDNN.benchmark, _CUDNN.deterministic),
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
}
# With these the code comes to every attribute of an object.
_WHOLE = {"__dict__", "vars", "asdict", "astuple", "__slots__"}
# With these it reads attributes that no class hears of.
_PAST = {"__getattribute__", "getattr_static"}
_CLOCKS = {
    getattr(time, f"{name}{unit}")
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
}
GENERATORS = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_BY_NAME = {"getattr", "hasattr"}
_CONTAINERS = (*SEQUENCES, dict)
_MEMO = type(functools.lru_cache(lambda: None))
# Methods that no call of a forward runs.
_IDLE_METHODS = {
    "__init__", "__new__", "__init_subclass__", "__class_getitem__", "__repr__", "__str__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__",
    "__del__", "__dir__", "__format__", "__getnewargs__", "__sizeof__", "__set_name__",
}  # fmt: skip
# Methods that a call of a class runs.
_MAKING = {"__init__", "__new__", "__post_init__"}
# The largest array and the largest tensor whose contents are compared at every call, in bytes: 0.1
# ms. Code that names a larger array is refused, a larger tensor is an input.
LARGE = LARGE_TENSOR = 1 << 20
# Facts of one module. What lies behind the last one is unwatched.
MOST_FACTS = 100_000


def compared(tensor: Tensor) -> Callable[[], bytes] | None:
    """Reads what a tensor holds, where it is so small that this is compared at every call."""
    return reader(tensor) if tensor.nbytes <= LARGE_TENSOR else None


class _Space(NamedTuple):
    """A class or a file of which what the code names is part of the state.

    Attributes:
        values: by name.
        enter: notes the value of a name.
        done: the names that were noted.
        apart: whether it is a file of a package apart, of which only code outside of such counts.
    """

    values: Any
    enter: Callable[[str, Any], None]
    done: set[str]
    apart: bool = False


class Survey:
    """Walks a module; notes every fact, every holder, and what the fast check has to look at.

    Args:
        module: where the walk begins.
        live: sub-modules whose own code runs at each call. Of these only parameters and children
            count, and what the code around them may name.
        unread: ids of modules, each with names of attributes that do not count.
        kinds: further classes whose code is in reach, such as those of arguments.

    Attributes:
        live: they and the modules in them, as far as their attributes do not count.
        facts: in the order of the walk, a parent's before its children's.
        modules: in the order of ``named_modules``, then those in plain attributes and lists.
        places: where each of these is.
        owners: modules and plain objects, whose ``__dict__`` counts.
        paths: where each owner's facts are.
        dicts: every other dictionary that is not empty.
        empty: dictionaries of hooks, children, parameters and buffers that are.
        lists: lists, sets and deques, which can change in place.
        namespaces: classes of the owners and those they hold, torch's own left out.
        tensors: parameters, buffers and loose tensors.
        loose: tensors that are neither parameter nor buffer, and so constants in a graph.
        uncompared: those of them whose contents nothing compares, by their ids.
        elements: reads the contents of each small array and loose tensor that the code names, the
            order of each OrderedDict, and the settings of PyTorch that the code asks for.
        slotted: objects with slots.
        cells: what functions close over.
        functions: in reach, whose code and defaults count.
        globals: of files, those that the code names.
        memos: functions under ``lru_cache``.
        references: weak ones.
        generators: that a forward may draw numbers from, by name: the global ones, its own.
        holders: all that can be put back.
        unwatched: what the code names and what cannot be watched, each with the reason.
        reads_trainable: whether the code reads ``requires_grad``, or what follows from it.
        asks_class: whether the code may ask of which class a value is, other than by isinstance.
        reads_past: whether the code may read attributes past ``__getattribute__``.
        names_on_tensors: those that the code names and that are none of every tensor's.
    """

    def __init__(
        self,
        module: nn.Module,
        live: Collection[nn.Module] = (),
        unread: Mapping[int, Collection[str]] = MappingProxyType({}),
        kinds: Iterable[type] = (),
    ) -> None:
        self._unread = unread
        self.asks_class = self.reads_past = False
        self.live: list[nn.Module] = []
        self._live = {id(inner) for each in live for inner in each.modules()}
        self.facts: dict[Key, Fact] = {}
        self.modules: list[nn.Module] = []
        self.places: list[str] = []
        self.owners: list[Any] = []
        self.paths: list[str] = []
        self.dicts: list[dict[Any, Any]] = []
        self.empty: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.namespaces: list[type] = []
        self.tensors: list[Tensor] = []
        self.loose: list[Tensor] = []
        self.uncompared: dict[int, Tensor] = {}
        self.elements: list[Callable[[], Hashable]] = []
        self.slotted: list[Any] = []
        self.cells: list[CellType] = []
        self.functions: list[FunctionType] = []
        self.globals: list[Globals] = []
        self.memos: list[Any] = []
        self.references: list[Any] = []
        self.generators: dict[str, Any] = {"random": random, "numpy.random": np.random}
        self.holders: list[Holder] = []
        self.unwatched: dict[str, str] = {}

        self._names: set[str] = set()
        self._outer_names: set[str] = set()  # of code that is in no package apart
        self._names_all = False
        self._seen: set[int] = {id(random), id(np.random)}
        self._kinds: dict[type, None] = dict.fromkeys(kinds)
        self._made: set[type] = set()  # which the code may make objects of
        self._whole: set[int] = set()
        self._functions: list[FunctionType] = []
        self._spaces: list[_Space] = []
        self._files: dict[int, Globals] = {}
        self._serials: Counter[str] = Counter()
        # From one object to the next: under which attribute, or none for what it consists of.
        self._ways: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        # What to do about an object if the code can name its way there.
        self._named: list[tuple[Any, Callable[[], None]]] = []
        self._packages = {package(type(each).__module__) for each in module.modules()}
        self._packages.update(package(kind.__module__) for kind in kinds)
        self._apart: dict[int, bool] = {}  # files, by what `is_apart` says of them
        self._by_name = False  # whether code of the user's asks for attributes by their names
        self._registered = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}

        self._hooks("every module", global_hooks.__dict__, "_global")
        self._module("", module)
        self._follow_code()
        while named_live := [each for each in self.live if self._is_named(each)]:
            self.live = [each for each in self.live if not self._is_named(each)]
            places = {id(m): place for m, place in zip(self.modules, self.places, strict=True)}
            for each in named_live:
                self._watch_attributes(places[id(each)], each)
                self._registry(places[id(each)], "buffer", each._buffers)
            self._follow_code()
        named = self._reached_by_name()
        for value, note in self._named:
            if id(value) in named:
                note()
        # Under which Python code may have put something on a tensor.
        self.names_on_tensors = frozenset(self._names - vars(Tensor).keys())
        self._attributes_of_tensors()
        for name in sorted(_SETTINGS_OF_TORCH.keys() & self._names):
            ask = _SETTINGS_OF_TORCH[name]
            self.elements.append(ask)
            setting = ask()
            self.facts["global torch", name] = Fact("value", setting, text=str(setting))
        self.reads_trainable = not self._names.isdisjoint(_TRAINABLE)
        if self.reads_trainable:
            self._trainable(module)

    # -- modules -----------------------------------------------------------------------------------

    def _module(self, path: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self.modules.append(module)
        self.places.append(path)
        self._ways[id(None)].append(("", id(module)))
        kind = type(module)
        self.facts[path, "__class__"] = Fact("class", object=kind, text=kind.__qualname__)
        for name, child in self._entries(module._modules):
            self.facts[path, name] = Fact("child", object=child)
        self._order(path, "children", module._modules)
        self._hooks(path, module.__dict__, "")
        if id(module) in self._live:
            self.live.append(module)
        else:
            self._watch_attributes(path, module)
        self._registry(path, "parameter", module._parameters)
        if id(module) not in self._live:
            self._registry(path, "buffer", module._buffers)
        for name, child in module._modules.items():
            if child is not None:
                self._module(_join(path, name), child)

    def _registry(self, path: str, role: str, entries: dict[str, Any]) -> None:
        for name, tensor in self._entries(entries):
            if tensor is None:
                self.facts[path, name] = Fact(role, text="None")
            elif id(tensor) not in self._registered:  # of a module in a plain list
                self._ways[id(None)].append(("", id(tensor)))
                self._loose(path, name, tensor)
            else:
                self.tensors.append(tensor)
                self.facts[path, name] = tensor_fact(role, tensor)
        self._order(path, f"{role}s", entries)

    def _attributes_of_tensors(self) -> None:
        """Notes what Python code has put on tensors, as mup does on weights, where code names it.

        Code that asks for one by its name, and goes on without, may find it at the next call.
        """
        tensors = list({id(each): each for each in self.tensors}.values())
        named = self.names_on_tensors
        if self._by_name or any(not named.isdisjoint(each.__dict__) for each in tensors):
            self.elements.append(partial(_attributes, tensors, named))
            for (path, name), fact in list(self.facts.items()):
                if isinstance(fact.object, Tensor):
                    for key in sorted(named.intersection(fact.object.__dict__)):
                        value = fact.object.__dict__[key]
                        state = constant_state(value) if isinstance(value, Tensor) else None
                        self.facts[path, f"{name}.{key}"] = value_fact(value) or Fact(
                            "object", state, object=value, text=short(value)
                        )

    def _order(self, path: str, role: str, entries: dict[str, Any]) -> None:
        """Notes in which order a container, or a loop over names, goes through what there is."""
        if len(entries) > 1:
            fact = Fact("order", tuple(entries), text=short([*entries]))
            self.facts[path, f"the order of its {role}"] = fact

    def _watch_attributes(self, path: str, module: nn.Module) -> None:
        self._own(path, module)
        free = UNWATCHED.union(weighed_attributes(module), self._unread.get(id(module), ()))
        for name, value in list(module.__dict__.items()):
            if name not in free and (name, type(value).__name__) != _SETTINGS:
                self._attribute(path, name, value, module, name)

    def _is_named(self, module: nn.Module) -> bool:
        """Whether code around a module that is read afresh at each call may name what it holds.

        Whether it trains is looked at in any case.
        """
        held = (module.__dict__.keys() | module._buffers.keys()) - UNWATCHED - {"training"}
        return self._names_all or not held.isdisjoint(self._names)

    def _own(self, path: str, owner: Any) -> None:
        self.owners.append(owner)
        self.paths.append(path)
        self.holders.append(Attributes(path, owner))
        self._kinds[type(owner)] = None

    def _entries(self, entries: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        (self.dicts if entries else self.empty).append(entries)
        return entries.items()

    def _hooks(self, path: str, state: dict[str, Any], prefix: str) -> None:
        for attribute, kind in HOOKS.items():
            hooks = state[prefix + attribute]
            self._entries(hooks)
            for number, hook in watched_hooks(hooks):
                flags = tuple(number in state.get(prefix + flag, ()) for flag in HOOK_FLAGS)
                self.facts[path, f"{prefix}{attribute}[{number}]"] = Fact(kind, flags, hook)
        for flag in HOOK_FLAGS:
            if state.get(prefix + flag):
                self.dicts.append(state[prefix + flag])

    def _trainable(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            path, _, last = name.rpartition(".")
            fact = Fact("value", parameter.requires_grad, text=str(parameter.requires_grad))
            self.facts[path, f"{last}.requires_grad"] = fact

    # -- values ------------------------------------------------------------------------------------

    def _attribute(self, path: str, name: str, value: Any, owner: Any, step: str = "") -> None:
        """Notes an attribute, or an element of one, of what stands at ``path``.

        Args:
            path: the module, object, class, function or file.
            name: the attribute; ``name[0]`` for an element.
            value: its value.
            owner: the object that holds it; None for a class, a function or a file.
            step: the attribute under which the code comes from there to here, if it needs one.
        """
        first_time = id(value) not in self._seen
        self._ways[id(owner)].append((step, id(value)))
        shared = None if first_time else value  # its elements are noted elsewhere
        place = _join(path, name)
        if len(self.facts) > MOST_FACTS:
            self._unwatched(value, place, f"lies behind {MOST_FACTS} values of the module's state")
        elif (fact := value_fact(value)) is not None:
            self.facts[path, name] = fact
            self._watch(place, value)
        elif isinstance(value, Tensor) and id(value) not in self._registered:
            self._loose(path, name, value)
        elif isinstance(value, SEQUENCES):
            held = elements(value)
            self.facts[path, name] = Fact("value", (type(value), len(held)), shared, short(value))
            if first_time:
                self._container(place, value)
                for index, child in enumerate(held):
                    self._attribute(path, f"{name}[{index}]", child, value)
        elif isinstance(value, dict | MappingProxyType):
            items = entries(value)
            names = [short(key) if frozen(key) is not MIXED else f"#{id(key)}" for key, _ in items]
            self.facts[path, name] = Fact("value", (type(value), *names), shared, short(value))
            if first_time:
                self._container(place, value)
                for key, (_, child) in zip(names, items, strict=True):
                    self._attribute(path, f"{name}[{key}]", child, value)
        else:
            self.facts[path, name] = Fact("object", object=value, text=short(value))
            if first_time or isinstance(value, nn.Module):
                self._inside(path, name, value)

    def _inside(self, path: str, name: str, value: Any) -> None:
        """What an object holds, of whatever kind it is."""
        place = _join(path, name)
        if isinstance(value, nn.Module):
            self._module(place, value)
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._functions.append(value)
        elif isinstance(value, MethodType):
            self._attribute(place, "__func__", value.__func__, value)
            self._attribute(path, f"{name}.__self__", value.__self__, value)
        elif isinstance(value, partial | partialmethod):
            for part in ("func", "args", "keywords"):
                self._attribute(place, part, getattr(value, part), value)
        elif isinstance(value, property):
            for part in ("fget", "fset", "fdel"):
                self._attribute(place, part, getattr(value, part), value)
        elif isinstance(value, staticmethod | classmethod):
            self._attribute(place, "__func__", value.__func__, value)
        elif isinstance(value, cached_property):
            self._attribute(place, "func", value.func, value)
        elif isinstance(value, _MEMO):
            self._memo(path, name, value)
        elif isinstance(value, type):
            self._kinds[value] = None
            self._made.add(value)
        elif isinstance(value, ModuleType):
            if not is_library(value.__name__):
                self._file(value.__dict__)
        elif isinstance(value, weakref.ref):
            self.references.append(value)
            self._attribute(path, f"{name}()", value(), value)
        elif isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
            self.generators[place] = value
        elif isinstance(value, np.ndarray):
            self._array(path, name, value)
        elif isinstance(value, os._Environ):
            self._attribute(place, "_data", vars(value)["_data"], value)
        elif is_plain(value):
            self._object(place, value)
        elif not is_constant(value):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            self._unwatched(value, place, f"is a {kind}, whose state cannot be seen")

    def _container(self, place: str, value: Any) -> None:
        self._seen.add(id(value))
        if isinstance(value, MappingProxyType):
            (value,) = gc.get_referents(value)
            if not isinstance(value, dict):
                return
        if isinstance(value, dict):
            self.dicts.append(value)
            if isinstance(value, OrderedDict):  # whose move_to_end is no write to the dictionary
                self.elements.append(lambda: tuple(map(id, OrderedDict.__iter__(value))))
        elif not isinstance(value, tuple | frozenset):
            self.lists.append(value)
        if (holder := container(place, value)) is not None:
            self.holders.append(holder)
        if type(value).__module__ != "builtins":
            self._object(place, value)

    def _watch(self, place: str, value: Any) -> None:
        """Watches what can change in place inside a container of scalars."""
        if isinstance(value, bytearray):
            self.elements.append(partial(bytes, value))
            self.holders.append(Elements(place, value))
        if not isinstance(value, (*SEQUENCES, dict)) or id(value) in self._seen:
            return
        held = [v for _, v in entries(value)] if isinstance(value, dict) else elements(value)
        if held or not isinstance(value, tuple):  # the empty tuple is everywhere
            self._container(place, value)
        for child in held:
            self._watch(place, child)

    def _object(self, place: str, value: Any) -> None:
        """The attributes and slots of an object."""
        self._kinds[type(value)] = None
        attributes = own_attributes(value)
        if attributes is not None:
            self._own(place, value)
            for name, child in list(attributes.items()):
                self._attribute(place, name, child, value, name)
        slots = slots_of(type(value))
        if slots:
            self.slotted.append(value)
            self.holders.append(Slots(place, value))
            for name, slot in slots.items():
                if (child := slot_value(slot, value)) is not ABSENT:
                    self._attribute(place, name, child, value, name)

    def _loose(self, path: str, name: str, tensor: Tensor) -> None:
        """A tensor that is neither parameter nor buffer."""
        fact = tensor_fact("tensor", tensor)
        state = (fact.value, constant_state(tensor))
        self.facts[path, name] = fact._replace(value=state)
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        self.tensors.append(tensor)
        self.loose.append(tensor)
        self.uncompared[id(tensor)] = tensor
        place = _join(path, name)

        def note() -> None:
            if tensor.requires_grad:
                self.unwatched[place] = "is no parameter and requires a gradient"
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                self.holders.append(Elements(place, tensor))
                if (read := compared(tensor)) is not None:
                    del self.uncompared[id(tensor)]
                    self.elements.append(read)
                    self.facts[path, name] = fact._replace(value=(state, read()))

        self._named.append((tensor, note))

    def _array(self, path: str, name: str, array: Any) -> None:
        text = f"{array.dtype}{list(array.shape)}"
        form = (array.dtype, array.shape, array.strides)
        self.facts[path, name] = Fact("array", form, array, text)
        place = _join(path, name)

        def note() -> None:
            if array.dtype.hasobject or array.nbytes > LARGE:
                self.unwatched[place] = (
                    f"is a numpy array {text}, too large to compare at every call"
                    if array.nbytes > LARGE
                    else "is a numpy array of objects"
                )
                return
            self.facts[path, name] = Fact("array", (*form, array.tobytes()), array, text)
            self.elements.append(array.tobytes)
            self.holders.append(Elements(place, array))

        self._named.append((array, note))

    def _memo(self, path: str, name: str, function: Any) -> None:
        inner = getattr(function, "__wrapped__", None)
        if isinstance(inner, FunctionType) and is_library(inner.__module__):
            return

        def note() -> None:
            self.memos.append(function)
            self.holders.append(Memo(_join(path, name), function))
            self.facts[path, f"{name}.cache"] = Fact(
                "value",
                memo_state(function),
                text="emptied {} times, {} results dropped".format(*memo_state(function)),
            )

        self._named.append((function, note))
        if inner is not None:
            self._attribute(_join(path, name), "__wrapped__", inner, function)

    def _reached_by_name(self) -> set[int]:
        """What the code in reach comes to along the names that it uses."""
        found, pending = {id(None)}, [id(None)]
        while pending:
            for step, value in self._ways.get(pending.pop(), ()):
                if value not in found and (not step or self._names_all or step in self._names):
                    found.add(value)
                    pending.append(value)
        return found

    def _unwatched(self, value: Any, place: str, reason: str) -> None:
        def note() -> None:
            self.unwatched[place] = reason

        self._named.append((value, note))

    # -- code --------------------------------------------------------------------------------------

    def _follow_code(self) -> None:
        """Walks classes, functions and globals until the code names nothing more."""
        for names in (self._names, self._outer_names):
            names.update(("forward", "__call__"))
        known: dict[type, None] = {}
        called: set[type] = set()
        while True:
            before = self._extent()
            called.update(map(type, self.modules))
            for kind in dict.fromkeys(chain.from_iterable(k.__mro__ for k in list(self._kinds))):
                if kind not in known:
                    known[kind] = None
                    self._class(kind, called=kind in called)
            functions, self._functions = self._functions, []
            for function in functions:
                self._function(function)
            for space in list(self._spaces):
                names = self._outer_names if space.apart else self._names
                for name in sorted((space.values.keys() & names) - space.done):
                    space.done.add(name)
                    space.enter(name, space.values[name])
            if before == self._extent() and not self._functions:
                return

    def _extent(self) -> tuple[int, ...]:
        """How much the walk has come to."""
        found = (self._names, self._outer_names, self._functions, self._kinds, self._spaces)
        return tuple(map(len, found))

    def _class(self, kind: type, *, called: bool) -> None:
        """Watches the namespace of a class; of torch's own only ``forward``, and by identity."""
        path = self._numbered(f"class {kind.__qualname__}")
        if called:
            forward: Any = kind.forward  # type: ignore[attr-defined]
            self.facts[path, "forward"] = Fact("object", object=forward, text=short(forward))
        if is_foreign(kind.__module__):
            forward = kind.__dict__.get("forward")
            if isinstance(forward, FunctionType) and kind is not nn.Module:
                self._names |= reach.names(forward.__code__)
                self._outer_names |= reach.names(forward.__code__)
            return
        self.namespaces.append(kind)
        self.holders.append(Namespace(path, kind))
        for name, value in kind.__dict__.items():
            fact = value_fact(value)
            self.facts[path, name] = fact or Fact("object", object=value, text=short(value))

        def enter(name: str, value: Any) -> None:
            self._attribute(path, name, value, None)

        # Python itself calls the special ones.
        done = {name for name in kind.__dict__ if name.startswith("__") and name.endswith("__")}
        self._spaces.append(_Space(kind.__dict__, enter, done))
        for name in sorted(done - _IDLE_METHODS):
            if isinstance(kind.__dict__[name], FunctionType | staticmethod | classmethod):
                enter(name, kind.__dict__[name])
        if kind in self._made:
            for name in sorted(done & _MAKING):
                enter(name, kind.__dict__[name])

    def _numbered(self, path: str) -> str:
        """Tells two classes or functions of one name apart, as two calls of a function make."""
        self._serials[path] += 1
        return f"{path}#{self._serials[path]}"

    def _function(self, function: FunctionType) -> None:
        """Watches what a function closes over, its defaults, and the globals that it names."""
        code, source = function.__code__, function.__globals__.get("__name__") or ""
        if function.__name__ != "__getattribute__":  # there it is the class's own way
            self.reads_past |= not reach.names(code).isdisjoint(_PAST)
        cells = list(zip(code.co_freevars, function.__closure__ or (), strict=False))
        if is_library(source):
            if not is_foreign(source):
                self._names |= reach.names(code)
                self._outer_names |= reach.names(code)
            for _, cell in cells:  # a decorator's, that holds a function of the user's
                inner = cell_value(cell)
                if isinstance(inner, FunctionType) and id(inner) not in self._seen:
                    self._seen.add(id(inner))
                    self._functions.append(inner)
            return
        self._by_name |= not reach.names(code).isdisjoint(_BY_NAME)
        apart = "torch" not in reach.names(code) and self._is_apart(function.__globals__)
        self._names |= reach.names(code)
        if not apart:
            self._outer_names |= reach.names(code)
        self._names_all |= not reach.names(code).isdisjoint(_WHOLE)
        self.asks_class |= reach.asks_class(code)
        path = self._numbered(f"function {function.__qualname__}")
        self.functions.append(function)
        self.holders.append(Signature(path, function))
        self.holders.append(Attributes(path, function))
        self.facts[path, "__code__"] = Fact("object", object=code, text="code")
        for name in ("__defaults__", "__kwdefaults__"):
            if (defaults := getattr(function, name)) is not None:
                self._attribute(path, name, defaults, None)
        for name, value in list(function.__dict__.items()):
            self._attribute(path, name, value, None)
        if cells:
            self.holders.append(Closure(path, function))
        for name, cell in cells:
            self.cells.append(cell)
            value = cell_value(cell)
            if name == "__class__" and isinstance(value, type):  # what super() stands on
                self._kinds[value] = None
            elif value is not ABSENT:
                self._attribute(path, name, value, None)
        for name, attribute in reach.global_names(code):
            value = function.__globals__.get(name, ABSENT)
            if not apart or value_fact(value) is not None or isinstance(value, _CONTAINERS):
                self._global(function.__globals__, name, attribute)

    def _is_apart(self, file: dict[str, Any]) -> bool:
        if id(file) not in self._apart:
            self._apart[id(file)] = is_apart(file, self._packages)
        return self._apart[id(file)]

    def _global(self, file: dict[str, Any], name: str, attribute: str = "") -> None:
        """Watches a global, or the attribute that is taken of it where it is a module of Python.

        A name that is none is watched all the same: a global may come to stand before a builtin.
        """
        value = file.get(name, ABSENT)
        if isinstance(value, ModuleType) and not is_library(value.__name__):
            if attribute:
                self._global(value.__dict__, attribute)
            else:
                self._file(value.__dict__)
        elif value is os and attribute in ("environ", "getenv"):
            self._attribute("global os", "environ", os.environ, None)
        elif value is time:
            self._clock(f"time.{attribute}", getattr(time, attribute, None))
        elif value is dt or value is dt.datetime or value is dt.date:
            for each in ("now", "utcnow", "today"):
                self._ways[id(None)].append((each, id(value)))
                self._unwatched(value, f"{name}.{each}", "tells the time")
        else:
            self._clock(name, value)
        source = str(file.get("__name__"))
        holder = self._files.get(id(file))
        if holder is None:
            holder = self._files[id(file)] = Globals(f"global {source}", file, {})
            self.globals.append(holder)
            self.holders.append(holder)
        if name in holder.names:
            return
        holder.names[name] = None
        if isinstance(value, ModuleType):
            self.facts[holder.path, name] = Fact("object", object=value, text=value.__name__)
        elif value is not ABSENT:
            self._attribute(holder.path, name, value, None)

    def _clock(self, name: str, value: Any) -> None:
        if isinstance(value, BuiltinFunctionType) and value in _CLOCKS:
            self.unwatched[name] = "tells the time"

    def _file(self, file: dict[str, Any]) -> None:
        """Watches of a module of Python whatever the code names."""
        if id(file) not in self._whole:
            self._whole.add(id(file))

            def enter(name: str, value: Any) -> None:
                self._global(file, name)

            self._spaces.append(_Space(file, enter, set(), self._is_apart(file)))


def _attributes(tensors: Iterable[Tensor], named: frozenset[str]) -> Hashable:
    """What there is on tensors under some names: 0.1 us a tensor."""
    return tuple(
        (index, key, _told_apart(value))
        for index, each in enumerate(tensors)
        if each.__dict__
        for key, value in each.__dict__.items()
        if key in named
    )


def _told_apart(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value), constant_state(value)
    held = frozen(value)
    return id(value) if held is MIXED else held


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
