"""``torch.onnx.export`` by the exporter for which a script was written.

Since PyTorch 2.9 another one is the default. It takes the old arguments and leaves most of them
aside: ``training`` above all, without which a model goes to its file in whichever mode it is, with
dropout that draws and batch normalization by the batch; and parameters are folded and renamed, by
whose names scripts say what to train.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ortrain.errors import OrtrainWarning

# What stood behind the model, its arguments and the file, in order of position.
_POSITIONS = (
    "export_params",
    "verbose",
    "training",
    "input_names",
    "output_names",
    "operator_export_type",
    "opset_version",
    "do_constant_folding",
    "dynamic_axes",
    "keep_initializers_as_inputs",
    "custom_opsets",
    "export_modules_as_functions",
)
# Arguments that the exporter of then had alone.
_ITS_OWN = frozenset(
    "training operator_export_type do_constant_folding dynamic_axes custom_opsets "
    "export_modules_as_functions autograd_inlining".split()
)
# Those that it took away itself by PyTorch 1.12, and that did nothing before.
_LEFT_OUT = frozenset(
    "_retain_param_name aten enable_onnx_checker example_outputs export_raw_ir fallback propagate "
    "strip_doc_string use_external_data_format".split()
)
# Those that only the exporter of today has.
_OF_TODAY = frozenset(
    "dynamo external_data dynamic_shapes custom_translation_table report optimize verify profile "
    "dump_exported_program artifacts_dir".split()
)
_EXPORTED = "torch.onnx.export"


def extend(module: ModuleType) -> None:
    """Has ``export`` take the exporter of then where it is called with the arguments of then.

    Args:
        module: ``torch.onnx``.
    """
    own = vars(module).get("export")
    if own is not None and not hasattr(own, "_ortrain_takes_old_arguments"):
        module.__dict__["export"] = _taking(own)


def _taking(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def export(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(_POSITIONS, args[3:], strict=False)), **kwargs}
        asked = sorted(named.keys() & (_ITS_OWN | _LEFT_OUT))
        if named.keys() & _OF_TODAY or not asked or len(args) > 3 + len(_POSITIONS):
            return own(*args, **kwargs)
        named = {name: value for name, value in named.items() if name not in _LEFT_OUT}
        warnings.warn(
            f"{_EXPORTED}: {', '.join(asked)} {'is an argument' if len(asked) == 1 else 'are'} of "
            "the exporter of then, by which the model is written: dynamo=False; say dynamo= to "
            "choose",
            OrtrainWarning,
            stacklevel=2,
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return own(*args[:3], dynamo=False, **named)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"{_EXPORTED}: the exporter of then fails ({type(error).__name__}: {reason}), and "
                "that of today takes its place, with the model in the mode that training= says",
                OrtrainWarning,
                stacklevel=2,
            )
            with _in_mode_of(args[0] if args else named.get("model"), named):
                return own(*args[:3], **named)

    export._ortrain_takes_old_arguments = True  # type: ignore[attr-defined]
    return export


@contextmanager
def _in_mode_of(model: Any, named: Mapping[str, Any]) -> Iterator[None]:
    """A module in the mode of ``training``, evaluation by default, and back in its own after it."""
    from torch import nn
    from torch.onnx import TrainingMode

    mode = named.get("training", TrainingMode.EVAL)
    if not isinstance(model, nn.Module) or mode == TrainingMode.PRESERVE:
        yield
        return
    modes = [(each, each.training) for each in model.modules()]
    model.train(mode == TrainingMode.TRAINING)
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
