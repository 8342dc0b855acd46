"""Fields of training arguments that transformers no longer has, with what became of them."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, TypeVar

from ortrain.errors import OrtrainWarning

_Arguments = TypeVar("_Arguments")
_TRANSLATED = "_old_fields_are_translated"

# Fields of old versions of transformers that are another field now.
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
# Fields that transformers took away, and why they have no effect.
_WITHOUT_EFFECT = {
    "logging_dir": "a tracker has its own folder",
    "half_precision_backend": "mixed precision is PyTorch's",
    "fp16_backend": "mixed precision is PyTorch's",
    "fp16_opt_level": "it was Apex's",
    "use_ipex": "transformers no longer has it",
    "jit_mode_eval": "transformers no longer has it",
    "use_mps_device": "PyTorch's device is taken by itself",
    "ray_scope": "transformers no longer has it",
    "tpu_metrics_debug": "transformers no longer has it",
    "mp_parameters": "transformers no longer has it",
    "past_index": "transformers no longer has it",
    "torchdynamo": "torch_compile_backend says what compiles",
    "push_to_hub_organization": "hub_model_id has the organization in it",
    "sharded_ddp": "fsdp took its place",
    "use_legacy_prediction_loop": "there is one loop, evaluation_loop",
    "xpu_backend": "ddp_backend says what processes talk by",
    "tpu_num_cores": "transformers no longer has it",
    "include_tokens_per_second": "include_num_input_tokens_seen has the log say it",
}


def _old(default: Any = None) -> Any:
    return field(default=default, metadata={"help": "Of old versions of transformers."})


@dataclass
class OldFields:
    """Fields of old versions of transformers; what became of them is said once for each object."""

    overwrite_output_dir: bool = _old(False)  # scripts read it; Trainer itself never did
    ort: bool = _old(False)  # of the transformers that came with ORTModule: wraps Trainer's model
    evaluation_strategy: str | None = _old()
    no_cuda: bool = _old(False)
    warmup_ratio: float = _old(0.0)
    group_by_length: bool = _old(False)
    adafactor: bool = _old(False)
    include_inputs_for_metrics: bool = _old(False)
    save_safetensors: bool = _old(True)
    dispatch_batches: bool | None = _old()
    split_batches: bool | None = _old()
    logging_dir: str | None = _old()
    half_precision_backend: str = _old("auto")
    fp16_backend: str = _old("auto")
    fp16_opt_level: str = _old("O1")
    use_ipex: bool = _old(False)
    jit_mode_eval: bool = _old(False)
    use_mps_device: bool = _old(False)
    ray_scope: str | None = _old("last")
    tpu_metrics_debug: bool = _old(False)
    mp_parameters: str = _old("")
    past_index: int = _old(-1)
    torchdynamo: str | None = _old()
    sharded_ddp: str = _old("")
    push_to_hub_model_id: str | None = _old()
    push_to_hub_organization: str | None = _old()
    push_to_hub_token: str | None = _old()
    per_gpu_train_batch_size: int | None = _old()
    per_gpu_eval_batch_size: int | None = _old()
    xpu_backend: str | None = _old()
    use_legacy_prediction_loop: bool = _old(False)  # loops of scripts' own trainers read it
    tpu_num_cores: int | None = _old()
    include_tokens_per_second: bool = _old(False)
    fsdp_min_num_params: int = _old(0)
    fsdp_transformer_layer_cls_to_wrap: str | None = _old()

    def translate(self) -> None:
        """Sets the fields of today, and says which of the old ones have no effect; once."""
        if vars(self).get(_TRANSLATED):
            return
        vars(self)[_TRANSLATED] = True
        told = []
        given: Any = self
        for old, new in _RENAMED.items():
            if (value := getattr(given, old)) != _default(old):
                setattr(given, new, value)
                told.append(f"{old} is {new} now")
        if given.warmup_ratio and not given.warmup_steps:
            given.warmup_steps = given.warmup_ratio
            told.append("warmup_ratio is warmup_steps now, as a number below 1")
        if given.group_by_length:
            given.train_sampling_strategy = "group_by_length"
            told.append("group_by_length is train_sampling_strategy='group_by_length' now")
        if given.adafactor:
            given.optim = "adafactor"
            told.append("adafactor is optim='adafactor' now")
        if given.include_inputs_for_metrics:
            given.include_for_metrics = [*given.include_for_metrics, "inputs"]
            told.append("include_inputs_for_metrics is include_for_metrics=['inputs'] now")
        if not given.save_safetensors:
            told.append("save_safetensors=False has no effect: weights are always safetensors")
        batches = {n: v for n in ("dispatch_batches", "split_batches") if (v := getattr(given, n))}
        if batches:
            first = next(iter(batches))
            if given.accelerator_config is not None:
                raise ValueError(f"{first} and accelerator_config: write both in the latter")
            given.accelerator_config = batches
            told.append(f"{first} stands in accelerator_config now")
        sharding = {
            name.removeprefix("fsdp_"): value
            for name in ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
            if (value := getattr(given, name))
        }
        if sharding:
            first = f"fsdp_{next(iter(sharding))}"
            if given.fsdp_config is not None:
                raise ValueError(f"{first} and fsdp_config: write both in the latter")
            given.fsdp_config = sharding
            told.append(f"{first} stands in fsdp_config now")
        told += [
            f"{name} has no effect: {why}"
            for name, why in _WITHOUT_EFFECT.items()
            if getattr(given, name) != _default(name)
        ]
        for line in told:
            warnings.warn(f"training arguments: {line}", OrtrainWarning, stacklevel=4)

    def set_evaluate(self, *args: Any, jit_mode: bool = False, **kwargs: Any) -> Any:
        """As in transformers; ``jit_mode`` has no effect."""
        given: Any = super()
        return _without_jit(given.set_evaluate, 6, args, jit_mode, kwargs)

    def set_testing(self, *args: Any, jit_mode: bool = False, **kwargs: Any) -> Any:
        """As in transformers; ``jit_mode`` has no effect."""
        given: Any = super()
        return _without_jit(given.set_testing, 2, args, jit_mode, kwargs)

    def set_lr_scheduler(self, *args: Any, warmup_ratio: float = 0, **kwargs: Any) -> Any:
        """As in transformers, where ``warmup_ratio``, once the fourth, is ``warmup_steps`` now."""
        given: Any = super()
        positions = ("name", "num_epochs", "max_steps", "warmup_ratio", "warmup_steps")
        named = {"warmup_ratio": warmup_ratio, **dict(zip(positions, args, strict=False)), **kwargs}
        ratio = named.pop("warmup_ratio")
        named["warmup_steps"] = named.get("warmup_steps") or ratio
        return given.set_lr_scheduler(**named)


def _without_jit(
    method: Any, count: int, args: tuple[Any, ...], jit_mode: bool, kwargs: dict[str, Any]
) -> Any:
    """Calls a method of the arguments without ``jit_mode``, once the last that it took."""
    if jit_mode or any(args[count:]):
        message = f"jit_mode has no effect: {_WITHOUT_EFFECT['jit_mode_eval']}"
        warnings.warn(f"training arguments: {message}", OrtrainWarning, stacklevel=3)
    return method(*args[:count], *args[count + 1 :], **kwargs)


def _default(name: str) -> Any:
    return OldFields.__dataclass_fields__[name].default


# --- where they are added ----------------------------------------------------------------------


def extend(module: ModuleType) -> None:
    """Has the training arguments of transformers itself take the fields of then.

    Scripts with an ORTModule in transformers' own Trainer have them, in calls, in subclasses and on
    the command line. Classes that are made of these later have them too. What was imported before
    stays as it was.

    Args:
        module: ``transformers.training_args`` or ``transformers.training_args_seq2seq``.
    """
    for name in ("TrainingArguments", "Seq2SeqTrainingArguments"):
        own = vars(module).get(name)
        if own is None or own.__module__ != module.__name__:
            continue
        if {each.name for each in fields(own)} & {each.name for each in fields(OldFields)}:
            continue  # a version that has them, or a class that was extended
        extended = with_old_fields(own)
        _save_as(extended, own)
        for place in [*sys.modules.values()]:
            of_transformers = (getattr(place, "__name__", None) or "").startswith("transformers")
            if of_transformers and vars(place).get(name) is own:
                setattr(place, name, extended)


def _save_as(extended: type, own: Any) -> None:
    """Has objects of a class be saved by its name, which is that of an extended one now.

    Trainer saves its arguments, and pickle takes no class that is not found by its own name.

    Args:
        extended: derives from the class.
        own: the class, which is what scripts have that imported it before.
    """
    reduce = own.__reduce_ex__

    def saved(self: Any, protocol: Any) -> Any:
        if type(self) is not own:
            return reduce(self, protocol)
        # From protocol 2 on pickle compares the class with the object's own.
        make, arguments, *state = reduce(self, 0)
        return make, tuple(extended if each is own else each for each in arguments), *state

    own.__reduce_ex__ = saved


def with_old_fields(kind: type[_Arguments]) -> type[_Arguments]:
    """A class of training arguments with the fields of then, by its own name; it itself if it has.

    Args:
        kind: a dataclass of training arguments.
    """
    if issubclass(kind, OldFields):
        return kind

    def completed(self: Any) -> None:
        self.translate()
        super(extended, self).__post_init__()

    names = ("__module__", "__qualname__", "__doc__")
    body = {**{name: getattr(kind, name) for name in names}, "__post_init__": completed}
    extended: Any = dataclass(type(kind.__name__, (OldFields, kind), body))
    made: type[_Arguments] = extended
    return made
