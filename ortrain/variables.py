"""Environment variables of ONNX Runtime Training that do nothing here, and what is said of them."""

from __future__ import annotations

import difflib
import os
import warnings

from ortrain.errors import OrtrainWarning

PREFIX = "ORTMODULE_"

# Those that act; `config` and `json_config` read them.
READ = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "CACHE_BYTES CACHE_DIR ENABLE_COMPUTE_OPTIMIZER ENABLE_CUSTOM_AUTOGRAD "
        "ENABLE_EMBEDDING_SPARSE_OPTIMIZER "
        "ENABLE_LABEL_SPARSE_OPTIMIZER FALLBACK_POLICY FALLBACK_RETRY JSON_CONFIG_PATH LOG_LEVEL "
        "MEMORY_OPT_LEVEL ONNX_OPSET_VERSION PRINT_INPUT_DENSITY PRINT_MEMORY_STATS SAVE_ONNX_PATH"
    ).split()
)

_OFF = frozenset({"0", "false", "no"})
_TRITON = "the stock onnxruntime runs no Triton kernels; graphs are recorded on GPUs by default"
_TUNING = "kernels are not tuned while they run; engine='auto' measures the engines instead"
_ATTENTION = "attention is one operator in each graph, and its kernel is chosen without a switch"
_BUILD = "there are no extensions to build"

# Variable → the values at which what it asks for is so in any case, and why others do nothing.
WITHOUT_EFFECT: dict[str, tuple[frozenset[str], str]] = {
    f"{PREFIX}CONV_ALGO_SEARCH": (
        frozenset({"heuristic"}),
        "on a GPU PyTorch chooses: torch.backends.cudnn.benchmark = True",
    ),
    f"{PREFIX}MEMORY_OPT_CONFIG": (
        frozenset(),
        "it names clusters of another graph; Options(memory_budget=) takes bytes",
    ),
    f"{PREFIX}ENABLE_MEM_EFFICIENT_GRAD_MGMT": (
        _OFF,
        "each piece of a backward hands out its gradients where somebody waits for them",
    ),
    f"{PREFIX}ALLOW_AUTOGRAD_CHECKPOINT": (
        _OFF,
        "checkpointed regions run again inside of the graph, which needs no permission",
    ),
    f"{PREFIX}SKIPCHECK_POLICY": (
        frozenset({"skip_check_disabled"}),
        "the checks before a step keep a stale graph from running, and take microseconds",
    ),
    f"{PREFIX}USE_TRITON": (_OFF, _TRITON),
    f"{PREFIX}TRITON_CONFIG_FILE": (frozenset(), _TRITON),
    f"{PREFIX}TRITON_DEBUG": (_OFF, _TRITON),
    f"{PREFIX}USE_EFFICIENT_ATTENTION": (_OFF, _ATTENTION),
    f"{PREFIX}USE_FLASH_ATTENTION": (_OFF, _ATTENTION),
    f"{PREFIX}ATEN_SDPA_FALLBACK": (_OFF, _ATTENTION),
    f"{PREFIX}ENABLE_TUNING": (_OFF, _TUNING),
    f"{PREFIX}MAX_TUNING_DURATION_MS": (frozenset(), _TUNING),
    f"{PREFIX}TUNING_RESULTS_PATH": (frozenset(), _TUNING),
    f"{PREFIX}ENABLE_ZERO_STAGE3": (
        _OFF,
        "steps under ZeRO-3 run in PyTorch; stages 1 and 2 do not",
    ),
    f"{PREFIX}DEEPCOPY_BEFORE_MODEL_EXPORT": (
        _OFF,
        "a capture leaves the module as it was without a copy of it",
    ),
    f"{PREFIX}ENABLE_SPARSE_OPTIMIZER": (
        frozenset({"1", "true", "yes"}),
        f"{PREFIX}ENABLE_COMPUTE_OPTIMIZER=0 or Options(skip_padding=False) switches that off",
    ),
    f"{PREFIX}SKIPPED_AUTOGRAD_FUNCTIONS": (
        frozenset(),
        "functions that a graph cannot take apart are nodes that PyTorch runs",
    ),
    "ONNXRUNTIME_FORCE_CUDA": (_OFF, _BUILD),
    "ONNXRUNTIME_CUDA_VERSION": (frozenset(), _BUILD),
    "ONNXRUNTIME_ROCM_VERSION": (frozenset(), _BUILD),
    "ONNXRUNTIME_CUDA_NVCC_EXTRA_ARGS": (frozenset(), _BUILD),
}

_told: set[str] = set()


def warn_of_variables() -> None:
    """Warns of variables that are set and do nothing here, of each once in a process."""
    lines = []
    for name, value in sorted(os.environ.items()):
        if name in _told or not value.strip() or (line := _line(name, value)) is None:
            continue
        _told.add(name)
        lines.append(line)
    if lines:
        warnings.warn("\n".join(lines), OrtrainWarning, stacklevel=3)


def _line(name: str, value: str) -> str | None:
    """What is said of a variable; None where it acts, or asks for what is so in any case."""
    if name in WITHOUT_EFFECT:
        so_anyway, why = WITHOUT_EFFECT[name]
        if value.strip().lower() in so_anyway:
            return None
        return f"{name}={value!r} does nothing here: {why}"
    if name in READ or not name.startswith(PREFIX):
        return None
    near = difflib.get_close_matches(name, [*READ, *WITHOUT_EFFECT], 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name}={value!r}: no variable of that name is read{hint}"
