"""Which old name is what now: the whole mapping, as data.

`MODULES` has, for each old module, the module of ortrain that has its names now and those names; an
asterisk stands for all names of that module, ``old=new`` for one that is called otherwise, and
``name=`` for a module. `REMOVED` has the names that are not here, with the reason and the way on.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TypeVar

from ortrain.compat import hugging_face
from ortrain.errors import OrtrainError

_Error = TypeVar("_Error", bound=OrtrainError)

# --- what is here -------------------------------------------------------------------------------

_SETTINGS = {"ortrain": "DebugOptions LogLevel"}
_MODULE = {"ortrain": "ORTModule"}
_SAMPLERS = {
    "ortrain.data.sampler": "LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler"
}
_FUSED = {"ortrain.optim": "FusedAdam AdamWMode FP16_Optimizer"}
_CONFIGS = {
    "ortrain.classic.optim": "AdamConfig LambConfig SGDConfig",
    "ortrain.classic.optim.config": "_OptimizerConfig",
}
_SCHEDULES = {
    "ortrain.classic.optim.lr_scheduler": "ConstantWarmupLRScheduler CosineWarmupLRScheduler "
    "LinearWarmupLRScheduler PolyWarmupLRScheduler _LRScheduler"
}
# onnxblock of ONNX Runtime 1.13 and 1.14.
_FIRST_BLOCKS = {"ortrain.compat.onnxblock": "TrainingModel onnx_model"}
_CLASSIC = {"ortrain.classic": "ORTTrainer ORTTrainerOptions TrainStepInfo"}
_SCALERS = {"ortrain.classic.amp": "LossScaler DynamicLossScaler"}
_RUNNING = {"ortrain.ondevice": "CheckpointState Module Optimizer LinearLRScheduler"}
_RANGES = {
    "ortrain.compat.ranges": "torch_nvtx_range_push torch_nvtx_range_pop nvtx_function_decorator"
}
_NESTED = {
    "ortrain.compat.nested": "extract_data_and_schema unflatten_data_using_schema PrimitiveType "
    "ORTModelInputOutputType ORTModelInputOutputSchemaType"
}
_HOOKS = {
    "ortrain.hooks": "GlobalSubscriberManager StatisticsSubscriber SubscriberBase "
    "SubscriberManager inspect_activation no_increase_global_step"
}
_EXCEPTIONS = (
    "ORTModuleFallbackException ORTModuleInitException "
    "ORTModuleDeviceException ORTModuleIOException ORTModuleIOError ORTModuleTorchModelException "
    "ORTModuleONNXModelException"
)
_FALLBACK = {"ortrain.compat.fallback": _EXCEPTIONS}
_DEBUGGING = {"ortrain.compat.debugging": "save_intermediate_onnx_graphs set_log_level"}
_CASTS = {
    "ortrain.compat.graph_config": "PropagateCastLevel PropagateCastOpsStrategy "
    "set_propagate_cast_ops_optimization"
}
_GRAPHS = {"ortrain.compat.gradient_graph": "GradientGraphBuilder get_optimized_model"}
_TRAINERS = {
    "ortrain.compat.trainers": "ORTTrainer ORTSeq2SeqTrainer ORTTrainingArguments "
    "ORTSeq2SeqTrainingArguments"
}
_ONE_FILE_MODELS = (
    "ORTModelForAudioClassification ORTModelForCTC ORTModelForFeatureExtraction "
    "ORTModelForImageClassification ORTModelForMaskedLM ORTModelForMultipleChoice "
    "ORTModelForQuestionAnswering ORTModelForSequenceClassification ORTModelForTokenClassification"
)
_FILE_NAMES = {
    "ortrain.compat.file_names": "ONNX_WEIGHTS_NAME ONNX_ENCODER_NAME ONNX_DECODER_NAME "
    "ONNX_DECODER_WITH_PAST_NAME ONNX_DECODER_MERGED_NAME"
}
_PAIRED_MODELS = "ORTModelForSeq2SeqLM ORTModelForSpeechSeq2Seq"
_CONFIGURED = (
    "ORTConfig OptimizationConfig AutoOptimizationConfig QuantizationConfig "
    "AutoQuantizationConfig CalibrationConfig AutoCalibrationConfig"
)
_QUANTIZATION = {"ortrain.deploy.quantization": "ORTQuantizableOperator QuantizationMode"}
_EXCLUSIONS = (
    "ExcludeGeLUNodes ExcludeLayerNormNodes ExcludeNodeAfter ExcludeNodeFollowedBy "
    "IncludeFullyConnectedNodes"
)

MODULES: dict[str, dict[str, str]] = {
    # torch-ort
    "torch_ort": {
        "ortrain": "ORTModule DebugOptions LogLevel",
        "ortrain.compat.seed": "set_seed",
        "ortrain.compat.inference": "ORTInferenceModule OpenVINOProviderOptions",
    },
    "torch_ort.configure": {"ortrain.compat.configure": "build_torch_cpp_extensions"},
    "torch_ort.optim": _FUSED,
    "torch_ort.utils": _SAMPLERS,
    "torch_ort.utils.data": _SAMPLERS,
    "torch_ort.experimental": {**_DEBUGGING, **_CASTS, "ortrain": "LogLevel"},
    "torch_ort.experimental.debug": {**_DEBUGGING, "ortrain": "LogLevel"},
    "torch_ort.experimental.json_config": {"ortrain.compat.json_config": "load_from_json"},
    "torch_ort.experimental.graph_config": _CASTS,
    # onnxruntime
    "onnxruntime": {"ortrain.compat.seed": "set_seed"},
    "onnxruntime.training": {
        **_CLASSIC,
        "ortrain": "ORTModule",
        "ortrain.compat.capabilities": "is_ortmodule_available",
        "ortrain.compat.graph_config": "PropagateCastOpsStrategy",
        "ortrain.compat.gradient_graph": "GradientGraphBuilder",
    },
    # onnxruntime: ORTModule
    "onnxruntime.training.ortmodule": {
        "ortrain": "ORTModule DebugOptions LogLevel",
        "ortrain.config": "ONNX_OPSET_VERSION=OPSET",
        "ortrain.compat.capabilities": "MINIMUM_RUNTIME_PYTORCH_VERSION_STR",
        "ortrain.compat.configure": "TORCH_CPP_DIR",
        "ortrain.compat.fallback": "ORTMODULE_FALLBACK_POLICY ORTMODULE_FALLBACK_RETRY",
    },
    "onnxruntime.training.ortmodule.ortmodule": _MODULE,
    "onnxruntime.training.ortmodule.options": _SETTINGS,
    "onnxruntime.training.ortmodule.debug_options": _SETTINGS,
    "onnxruntime.training.ortmodule._logger": {"ortrain": "LogLevel"},
    "onnxruntime.training.ortmodule._fallback": {
        "ortrain.compat.fallback": f"_FallbackPolicy {_EXCEPTIONS}"
    },
    "onnxruntime.training.ortmodule._fallback_exceptions": _FALLBACK,
    "onnxruntime.training.ortmodule._custom_autograd_function": {
        "ortrain.compat.capabilities": "enable_custom_autograd_support"
    },
    "onnxruntime.training.ortmodule.experimental": {},
    "onnxruntime.training.ortmodule.experimental.json_config": {
        "ortrain.compat.json_config": "load_from_json"
    },
    "onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule": {
        "ortrain.hierarchical": "HierarchicalORTModule"
    },
    "onnxruntime.training.ortmodule.torch_cpp_extensions": {
        "ortrain.compat.configure": "is_installed"
    },
    "onnxruntime.training.ortmodule.torch_cpp_extensions.install": {
        "ortrain.compat.configure": "build_torch_cpp_extensions"
    },
    # onnxruntime: optimizers, data, hooks
    "onnxruntime.training.optim": {**_FUSED, **_CONFIGS, **_SCHEDULES},
    "onnxruntime.training.optim.config": _CONFIGS,
    "onnxruntime.training.optim.fused_adam": {"ortrain.optim": "FusedAdam AdamWMode"},
    "onnxruntime.training.optim.fp16_optimizer": {"ortrain.optim": "FP16_Optimizer"},
    "onnxruntime.training.optim.lr_scheduler": _SCHEDULES,
    "onnxruntime.training.utils": {
        **_NESTED,
        **_RANGES,
        "ortrain.compat.tables": "PTable",
        "ortrain.compat.memory": "log_memory_usage",
        "ortrain.compat.capabilities": "get_runtime_pytorch_version",
    },
    "onnxruntime.training.utils.torch_io_helper": _NESTED,
    "onnxruntime.training.utils.torch_profile_utils": _RANGES,
    "onnxruntime.training.utils.ptable": {"ortrain.compat.tables": "PTable"},
    "onnxruntime.training.utils.data": _SAMPLERS,
    "onnxruntime.training.utils.data.sampler": _SAMPLERS,
    "onnxruntime.training.utils.hooks": {
        **_HOOKS,
        "ortrain.compat.activation": "_InspectActivation",
    },
    "onnxruntime.training.utils.hooks.merge_activation_summary": {
        "ortrain.hooks.merge_activation_summary": "*"
    },
    # onnxruntime: on-device training
    "onnxruntime.training.api": _RUNNING,
    "onnxruntime.training.api.checkpoint_state": {"ortrain.ondevice": "CheckpointState Parameter"},
    "onnxruntime.training.api.module": {"ortrain.ondevice": "Module"},
    "onnxruntime.training.api.optimizer": {"ortrain.ondevice": "Optimizer"},
    "onnxruntime.training.api.lr_scheduler": {"ortrain.ondevice": "LinearLRScheduler"},
    "onnxruntime.training.artifacts": {
        "ortrain.compat.artifacts": "generate_artifacts",
        "ortrain.ondevice": "LossType OptimType",
    },
    "onnxruntime.training.onnxblock": {
        "ortrain.ondevice.onnxblock": "Block ForwardBlock TrainingBlock base empty_base "
        "custom_op_library load_checkpoint_to_model save_checkpoint",
        **_FIRST_BLOCKS,
    },
    "onnxruntime.training.onnxblock.model": _FIRST_BLOCKS,
    "onnxruntime.training.onnxblock.building_blocks": {"ortrain.ondevice.onnxblock.blocks": "*"},
    "onnxruntime.training.onnxblock.blocks": {"ortrain.ondevice.onnxblock.blocks": "*"},
    "onnxruntime.training.onnxblock.loss": {"ortrain.ondevice.onnxblock.loss": "*"},
    "onnxruntime.training.onnxblock.loss.loss": {"ortrain.ondevice.onnxblock.loss": "*"},
    "onnxruntime.training.onnxblock.optim": {"ortrain.ondevice.onnxblock.optim": "*"},
    "onnxruntime.training.onnxblock.optim.optim": {"ortrain.ondevice.onnxblock.optim": "*"},
    "onnxruntime.training.onnxblock.onnxblock": {
        "ortrain.ondevice.onnxblock": "ForwardBlock TrainingBlock"
    },
    "onnxruntime.training.onnxblock.checkpoint_utils": {
        "ortrain.ondevice.onnxblock": "load_checkpoint_to_model save_checkpoint"
    },
    "onnxruntime.training.onnxblock.model_accessor": {
        "ortrain.ondevice.onnxblock": "base empty_base custom_op_library",
        "ortrain.compat.onnxblock": "onnx_model",
    },
    # onnxruntime: gradient graphs
    "onnxruntime.training.experimental": {"ortrain.compat.gradient_graph": "export_gradient_graph"},
    "onnxruntime.training.experimental.gradient_graph": {
        "ortrain.compat.gradient_graph": "export_gradient_graph"
    },
    "onnxruntime.training.experimental.gradient_graph._gradient_graph_tools": {
        "ortrain.compat.gradient_graph": "export_gradient_graph"
    },
    "onnxruntime.capi": {},
    "onnxruntime.capi._pybind_state": {
        **_GRAPHS,
        "ortrain.compat.graph_config": "PropagateCastOpsStrategy",
        "ortrain.compat.capabilities": "is_ortmodule_available is_triton_enabled "
        "is_torch_interop_default_on",
        "ortrain.compat.session_settings": "set_arena_extend_strategy set_cuda_device_id "
        "set_cuda_mem_limit get_mpi_context_local_rank get_mpi_context_local_size "
        "get_mpi_context_world_rank get_mpi_context_world_size",
    },
    "onnxruntime.capi.onnxruntime_pybind11_state": _GRAPHS,
    # onnxruntime: the trainers of 2020
    "onnxruntime.training.amp": _SCALERS,
    "onnxruntime.training.amp.loss_scaler": _SCALERS,
    "onnxruntime.training.checkpoint": {"ortrain.classic.checkpoint": "*"},
    "onnxruntime.training._utils": {},
    "onnxruntime.training.orttrainer": _CLASSIC,
    "onnxruntime.training.orttrainer_options": {"ortrain.classic": "ORTTrainerOptions"},
    "onnxruntime.capi.ort_trainer": {"ortrain.classic.first": "*"},
    "onnxruntime.capi.training": _CLASSIC,
    "onnxruntime.capi.training.amp": _SCALERS,
    "onnxruntime.capi.training.checkpoint": {"ortrain.classic.checkpoint": "*"},
    "onnxruntime.capi.training.optim": {**_CONFIGS, **_SCHEDULES},
    "onnxruntime.capi.training.optim.config": _CONFIGS,
    "onnxruntime.capi.training.optim.lr_scheduler": _SCHEDULES,
    "onnxruntime.capi.training.orttrainer": _CLASSIC,
    "onnxruntime.capi.training.orttrainer_options": {"ortrain.classic": "ORTTrainerOptions"},
    # Optimum
    "optimum": {},
    "optimum.onnxruntime": {
        **_TRAINERS,
        **_QUANTIZATION,
        **_FILE_NAMES,
        "ortrain.compat.exported": f"{_ONE_FILE_MODELS} {_PAIRED_MODELS} ORTModelForCausalLM",
        "ortrain.compat.pipelines": "pipeline",
        "ortrain.compat.rewriting": "ORTOptimizer ORTQuantizer",
        "ortrain.deploy": _CONFIGURED,
        "ortrain.deploy.models": "ORTModel",
    },
    "optimum.pipelines": {"ortrain.compat.pipelines": "pipeline"},
    "optimum.utils": {"ortrain.compat.file_names": "CONFIG_NAME"},
    "optimum.onnxruntime.configuration": {**_QUANTIZATION, "ortrain.deploy": _CONFIGURED},
    "optimum.onnxruntime.optimization": {"ortrain.compat.rewriting": "ORTOptimizer"},
    "optimum.onnxruntime.quantization": {
        "ortrain.compat.rewriting": "ORTQuantizer",
        "ortrain.deploy.quantization": "ORTCalibrationDataReader",
    },
    "optimum.onnxruntime.preprocessors": {
        "ortrain.deploy.quantization": "PreprocessorPass QuantizationPreprocessor"
    },
    "optimum.onnxruntime.preprocessors.passes": {"ortrain.deploy.quantization": _EXCLUSIONS},
    "optimum.onnxruntime.modeling_ort": {
        "ortrain.compat.exported": _ONE_FILE_MODELS,
        "ortrain.deploy.models": "ORTModel",
    },
    "optimum.onnxruntime.modeling_decoder": {"ortrain.compat.exported": "ORTModelForCausalLM"},
    "optimum.onnxruntime.modeling_seq2seq": {
        "ortrain.compat.exported": _PAIRED_MODELS,
        "ortrain.deploy.models.encoder": "ORTEncoder",
    },
    "optimum.onnxruntime.trainer": {
        "ortrain.compat.trainers": "ORTTrainer",
        "ortrain.trainer.loss": "ModuleWithLoss",
    },
    "optimum.onnxruntime.trainer_seq2seq": {"ortrain.compat.trainers": "ORTSeq2SeqTrainer"},
    "optimum.onnxruntime.training_args": {
        "ortrain.compat.trainers": "ORTTrainingArguments ORTOptimizerNames"
    },
    "optimum.onnxruntime.training_args_seq2seq": {
        "ortrain.compat.trainers": "ORTSeq2SeqTrainingArguments"
    },
    "optimum.onnxruntime.utils": {
        **_FILE_NAMES,
        "ortrain.compat.capabilities": "is_onnxruntime_training_available=is_ortmodule_available",
    },
    # transformers and datasets
    **hugging_face.NAMES,
}

# Old modules that `-m` runs → those that run in their place.
PROGRAMS = {
    "torch_ort.configure": "ortrain.compat.configure",
    "onnxruntime.training.ortmodule.torch_cpp_extensions.install": "ortrain.compat.configure",
    "onnxruntime.training.utils.hooks.merge_activation_summary": (
        "ortrain.hooks.merge_activation_summary"
    ),
}

# --- what is not --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Removal:
    """Why an old name is not here.

    Attributes:
        because: the reason.
        help: what to use in its place.
    """

    because: str
    help: str

    def error(self, kind: type[_Error], name: str) -> _Error:
        """The error of whoever asks for the name."""
        return kind(f"{name} is not in ortrain", because=self.because, help=self.help)


_SESSIONS = Removal(
    "graphs are ordinary sessions of the stock onnxruntime, cut into forward and backward",
    "ortrain.differentiate and ortrain.autodiff.partition make such graphs; see docs/pipeline.md",
)
_SYMBOLICS = Removal(
    "modules are captured by torch.export, not by TorchScript's symbolic functions",
    "wrap the part that is captured; what is missing is named in model.report.reason",
)
_CUSTOM_FUNCTIONS = Removal(
    "a custom autograd function is a node that PyTorch runs, or captured as what it computes",
    "see custom autograd functions in docs/limits.md",
)
_GRADIENT = Removal(
    "a gradient is a Python function that emits ONNX, not a list of nodes",
    '@ortrain.gradient("domain::Operator"); see docs/operators.md',
)
_PASSES = Removal(
    "graphs are rewritten before they are lowered, by passes that are data",
    "onnxscript.rewriter and onnx_ir for models of your own; ortrain.passes.PIPELINES",
)
_TRITON = Removal(
    "the stock onnxruntime runs no Triton kernels",
    "Options(engine='aten') on a GPU",
)
_PIPELINE = Removal(
    "pipeline parallelism of DeepSpeed around ORTModule is not built",
    "wrap the layers by hand: PipelineModule(layers=[ORTModule(layer), …])",
)
_ZERO_3 = Removal(
    "under ZeRO-3 the weights are not there while a graph runs, so such steps run in PyTorch",
    "ZeRO stage 1 or 2, which nothing has to be configured for",
)
_KERNELS = Removal(
    "there are no compiled extensions", "torch._foreach_* and torch.optim's fused=True"
)
_MODELS = Removal(
    "ortrain has classes of exported models for twelve tasks, and none for this",
    "the ORTModelFor… classes of ortrain.deploy, or export_onnx and an InferenceSession",
)
_PARAMETERS = Removal(
    "it configured sessions of a build of onnxruntime that is no longer made",
    "ORTTrainerOptions of ortrain.classic, or ortrain.Options",
)
_TUNING = Removal("kernels are not tuned in the runtime", "Options(engine='auto') measures engines")

_TRAINING = "onnxruntime.training"
_ORTMODULE = "onnxruntime.training.ortmodule"
_C = ("onnxruntime.capi._pybind_state", "onnxruntime.capi.onnxruntime_pybind11_state")

REMOVED: dict[str, Removal] = {
    "torch_ort.experimental.exporter": _SYMBOLICS,
    f"{_TRAINING}.TrainingParameters": _PARAMETERS,
    f"{_TRAINING}.TrainingSession": _SESSIONS,
    f"{_TRAINING}.training_session": _SESSIONS,
    "onnxruntime.capi.training.training_session": _SESSIONS,
    f"{_TRAINING}.ort_triton": _TRITON,
    f"{_TRAINING}.experimental.exporter": _SYMBOLICS,
    f"{_TRAINING}.optim.fused_ops": _KERNELS,
    f"{_TRAINING}.optim._multi_tensor_apply": _KERNELS,
    f"{_TRAINING}.utils.torch_type_map": _SYMBOLICS,
    f"{_TRAINING}.utils.save_tuning_results": _TUNING,
    f"{_TRAINING}.utils.set_tuning_results": _TUNING,
    f"{_TRAINING}.utils.hooks.ZeROOffloadSubscriber": _ZERO_3,
    f"{_TRAINING}.utils.hooks.configure_ort_compatible_zero_stage3": _ZERO_3,
    f"{_TRAINING}.postprocess": _PASSES,
    f"{_TRAINING}.model_desc_validation": _PARAMETERS,
    f"{_TRAINING}.onnxblock._training_graph_utils": _SESSIONS,
    f"{_ORTMODULE}.register_graph_optimizer": _PASSES,
    f"{_ORTMODULE}.graph_optimizers": _PASSES,
    f"{_ORTMODULE}.graph_optimizer_registry": _PASSES,
    f"{_ORTMODULE}.experimental.pipe": _PIPELINE,
    f"{_ORTMODULE}.experimental.ORTPipelineModule": _PIPELINE,
    f"{_ORTMODULE}._custom_op_symbolic_registry": _SYMBOLICS,
    f"{_ORTMODULE}._custom_gradient_registry": _GRADIENT,
    f"{_ORTMODULE}._custom_autograd_function_exporter": _CUSTOM_FUNCTIONS,
    f"{_ORTMODULE}._custom_autograd_function_runner": _CUSTOM_FUNCTIONS,
    f"{_ORTMODULE}._zero_stage3_compatibility": _ZERO_3,
    f"{_ORTMODULE}.options._RuntimeOptions": _PARAMETERS,
    f"{_ORTMODULE}.options._SkipCheck": Removal(
        "the checks before a step keep a stale graph from running, and take microseconds",
        "leave it out",
    ),
    f"{_ORTMODULE}.options._MemoryOptimizationLevel": Removal(
        "memory is a budget in bytes here", "Options(memory_budget='least'), or bytes"
    ),
    f"{_ORTMODULE}._fallback._FallbackManager": Removal(
        "what falls back is a setting", "Options(fallback=…, policy=…)"
    ),
    **{
        f"{c}.{name}": removal
        for c in _C
        for name, removal in {
            "OrtModuleGraphBuilder": _SESSIONS,
            "OrtModuleGraphBuilderConfiguration": _SESSIONS,
            "TrainingAgent": _SESSIONS,
            "TrainingGraphTransformerConfiguration": _SESSIONS,
            "PartialGraphExecutionState": _SESSIONS,
            "OrtValueCache": _SESSIONS,
            "TrainingParameters": _PARAMETERS,
            "TrainingSession": _PARAMETERS,
            "register_gradient_definition": _GRADIENT,
            "register_aten_op_executor": _SYMBOLICS,
        }.items()
    },
    "optimum.onnxruntime.runs": _MODELS,
    "optimum.onnxruntime.model": _MODELS,
    "optimum.onnxruntime.trainer.ORTFeaturesManager": _MODELS,
    "optimum.onnxruntime.utils.evaluation_loop": _MODELS,
}

# The starts of names of families, all of which are not here.
REMOVED_FAMILIES: dict[str, Removal] = {
    "optimum.onnxruntime.ORTModel": _MODELS,
    "optimum.onnxruntime.ORTDiffusion": _MODELS,
    "optimum.onnxruntime.ORTStableDiffusion": _MODELS,
}

# --- look-ups -----------------------------------------------------------------------------------

ROOTS = frozenset(name.partition(".")[0] for name in MODULES)
# With the packages that they are in.
PACKAGES = frozenset(
    ".".join(parts[: i + 1])
    for name in MODULES
    for parts in [name.split(".")]
    for i in range(len(parts))
)


def explicit(module: str) -> dict[str, str]:
    """Old name → ``module:name`` that it is now, of the names that the table spells out."""
    homes = {}
    for home, names in MODULES.get(module, {}).items():
        for each in names.split():
            old, _, new = each.partition("=")
            if old != "*":
                homes[old] = f"{home}:{new or old}"
    return homes


def starred(module: str) -> list[str]:
    """The modules all of whose names an old module has."""
    return [home for home, names in MODULES.get(module, {}).items() if "*" in names.split()]


def home_of(module: str, name: str) -> str | None:
    """``module:name`` that an attribute of an old module is now; None where the table has none."""
    found = explicit(module).get(name)
    if found is None and not name.startswith("_"):
        for home in starred(module):
            if hasattr(importlib.import_module(home), name):
                return f"{home}:{name}"
    return found


def names_of(module: str) -> list[str]:
    """The public names of an old module, those of loaded modules where it has all of theirs."""
    names = {name for name in explicit(module) if not name.startswith("_")}
    for home in starred(module):
        target = importlib.import_module(home)
        names |= {n for n in getattr(target, "__all__", dir(target)) if not n.startswith("_")}
    return sorted(names)


def removal_of(name: str) -> Removal | None:
    """Why an old dotted name is not here; None where the table does not say so."""
    if name.partition(".")[0] not in ROOTS:
        return None
    families = (removal for start, removal in REMOVED_FAMILIES.items() if name.startswith(start))
    return REMOVED.get(name) or next(families, None)
