"""Onnxruntime's own rewrites of a graph, made once and kept in the file."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from ortrain.deploy.optimization.configuration import OptimizationConfig
from ortrain.deploy.optimization.fusions.matching import integer
from ortrain.errors import ExecutionError, OrtrainWarning

_LEVELS = {
    0: "ORT_DISABLE_ALL",
    1: "ORT_ENABLE_BASIC",
    2: "ORT_ENABLE_EXTENDED",
    99: "ORT_ENABLE_ALL",
}
# Names of onnxruntime's rewrites, by the option that turns them off.
_REWRITES = {
    "disable_gelu_fusion": ("GeluFusionL1", "GeluFusionL2", "FastGeluFusion", "QuickGeluFusion"),
    "disable_attention_fusion": ("AttentionFusion", "GroupQueryAttentionFusion"),
    "disable_bias_gelu_fusion": ("BiasGeluFusion",),
    "disable_layer_norm_fusion": (
        "LayerNormFusionL1",
        "LayerNormFusionL2",
        "SimplifiedLayerNormFusion",
    ),
    "disable_skip_layer_norm_fusion": ("SkipLayerNormFusion",),
    "disable_embed_layer_norm_fusion": ("EmbedLayerNormFusion",),
}
# Whose kernels are slower on a processor than what they replace (:mod:`.fusions.skip_norms`).
_SLOW = {"disable_skip_layer_norm_fusion", "disable_bias_gelu_fusion"}
CUDA = "CUDAExecutionProvider"


def providers(config: OptimizationConfig) -> list[str]:
    """Where a file is to run, of what this machine has."""
    if config.optimize_for_gpu and CUDA in onnxruntime.get_available_providers():
        return [CUDA, "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def level_of(config: OptimizationConfig) -> int:
    """The level of rewrites that can be made here.

    Those beyond 1 are made for the device that runs them. Without a GPU, a file for one gets those
    that hold everywhere, and the warning says so; onnxruntime makes the others when it loads it.
    """
    level = config.optimization_level
    if config.optimize_for_gpu and CUDA not in providers(config) and level > 1:
        warnings.warn(
            f"onnxruntime's rewrites of level {level} for CUDA cannot be made here: its "
            f"{CUDA} is not available. Those of level 1 are made; a session on the GPU makes the "
            "others when it loads the file",
            OrtrainWarning,
            stacklevel=4,
        )
        return 1
    return level


def disabled(config: OptimizationConfig, model: ir.Model) -> list[str]:
    """Names of the rewrites that a configuration turns off, or that would make a model another.

    Args:
        config: what is asked for.
        model: to be rewritten.
    """
    off = {option for option in _REWRITES if getattr(config, option)}
    if config.enable_transformers_specific_optimizations and not config.optimize_for_gpu:
        off |= _SLOW
    if _misreads_norms(model):
        off.add("disable_layer_norm_fusion")
    return [name for option in sorted(off) for name in _REWRITES[option]]


def _misreads_norms(model: ir.Model) -> bool:
    """Whether a norm of a model may have an epsilon that onnxruntime does not read.

    It then takes 1e-5, whatever it is: of an RMS norm in float64, and of any that may be fed (1.31;
    with 0.5 in its place, results differ by 1.2).
    """
    if any(value.is_initializer() for value in model.graph.inputs):
        return True
    double = ir.DataType.DOUBLE
    for graph in model.graphs():
        known = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
        if any(value.dtype == double for value in known):
            return True
        for node in graph:
            if any(value.dtype == double for value in node.outputs):
                return True
            if node.op_type == "Cast" and integer(node, "to", 0) == int(double):
                return True
    return False


def rewrite(
    source: Path, target: Path, level: int, on: Sequence[str], without: Sequence[str]
) -> None:
    """Has onnxruntime load a file, rewrite its graph and write it.

    Args:
        source: the file.
        target: the file to write, with its weights in ``<name>.weights`` beside it.
        level: 1, 2 or 99.
        on: names of execution providers.
        without: names of rewrites that are not made.

    Raises:
        ExecutionError: onnxruntime cannot load the model.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[level])
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 3
    # Weights that it has written inside would have to fit into one protobuf.
    key = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(f"{key}file_name", f"{target.name}.weights")
    options.add_session_config_entry(f"{key}min_size_in_bytes", "1024")
    _load(source, options, on, without)


def check_loads(path: Path, on: Sequence[str]) -> None:
    """Has onnxruntime load a file that was written, as it stands.

    Raises:
        ExecutionError: it cannot.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    _load(path, options, on, ())


def _load(
    path: Path, options: onnxruntime.SessionOptions, on: Sequence[str], without: Sequence[str]
) -> None:
    try:
        onnxruntime.InferenceSession(
            path, options, providers=list(on), disabled_optimizers=list(without)
        )
    except Exception as error:
        raise ExecutionError(
            f"onnxruntime cannot load {path.name}",
            because=str(error),
            help="run the model in onnxruntime before it is optimized; if it does run, report this",
        ) from error
