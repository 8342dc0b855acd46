"""What transformers 4 and datasets 2 had that their versions of today have not, as data.

The example scripts of Optimum 1.23 and of transformers 4.30 to 4.45 are written with it. As with
all of the table, what an installed version has stays its own.
"""

from __future__ import annotations

_OFFLINE = {"huggingface_hub": "is_offline_mode"}
_CACHE = {"huggingface_hub.constants": "TRANSFORMERS_CACHE=HF_HUB_CACHE"}
_TELEMETRY = {"ortrain.compat.telemetry": "send_example_telemetry"}
_AVAILABLE = {
    "ortrain.compat.available": "is_flax_available is_safetensors_available is_tf_available "
    "is_torch_tpu_available"
}
_ADAMW = {"ortrain.compat.adamw": "AdamW"}
_STRATEGY = {"transformers.trainer_utils": "EvaluationStrategy=IntervalStrategy"}

# Each old module → the module that has its names now, and those names, as in the table of names.
NAMES: dict[str, dict[str, str]] = {
    "transformers": {
        **_ADAMW,
        **_AVAILABLE,
        **_CACHE,
        "transformers": "MT5Tokenizer=T5Tokenizer MT5TokenizerFast=T5TokenizerFast",
    },
    "transformers.utils": {**_AVAILABLE, **_CACHE, **_OFFLINE, **_TELEMETRY},
    "transformers.utils.hub": {**_CACHE, **_OFFLINE, **_TELEMETRY},
    "transformers.utils.import_utils": _AVAILABLE,
    "transformers.file_utils": {**_AVAILABLE, **_CACHE, **_OFFLINE, **_TELEMETRY},
    "transformers.modeling_utils": {
        "transformers.pytorch_utils": "apply_chunking_to_forward prune_linear_layer"
    },
    "transformers.optimization": _ADAMW,
    "transformers.trainer_utils": _STRATEGY,
    "transformers.training_args": _STRATEGY,
    "transformers.deepspeed": {"transformers.integrations.deepspeed": "*"},
    "datasets": {"ortrain.compat.metrics": "load_metric"},
    "datasets.load": {"ortrain.compat.metrics": "load_metric"},
}

# Where one of these is not installed it is not made up: programs look whether it is there.
HOSTS = frozenset({"datasets", "transformers"})

_FROM_PRETRAINED = "ortrain.compat.tokens:extend"

# Installed modules → functions, ``module:name``, that have what is in them take old arguments.
EXTENSIONS: dict[str, tuple[str, ...]] = {
    "transformers.configuration_utils": (_FROM_PRETRAINED,),
    "transformers.generation.configuration_utils": (_FROM_PRETRAINED,),
    "transformers.modeling_utils": (_FROM_PRETRAINED,),
    "transformers.tokenization_utils_base": (_FROM_PRETRAINED, "ortrain.compat.targets:extend"),
    "transformers.feature_extraction_utils": (_FROM_PRETRAINED,),
    "transformers.image_processing_base": (_FROM_PRETRAINED,),
    "transformers.video_processing_utils": (_FROM_PRETRAINED,),
    "transformers.processing_utils": (_FROM_PRETRAINED,),
    "transformers.models.auto.configuration_auto": (_FROM_PRETRAINED,),
    "transformers.models.auto.modeling_auto": (_FROM_PRETRAINED,),
    "transformers.models.auto.tokenization_auto": (_FROM_PRETRAINED,),
    "transformers.models.auto.feature_extraction_auto": (_FROM_PRETRAINED,),
    "transformers.models.auto.image_processing_auto": (_FROM_PRETRAINED,),
    "transformers.models.auto.video_processing_auto": (_FROM_PRETRAINED,),
    "transformers.models.auto.processing_auto": (_FROM_PRETRAINED,),
    "transformers.training_args": ("ortrain.compat.old_fields:extend",),
    "transformers.training_args_seq2seq": ("ortrain.compat.old_fields:extend",),
    "transformers.trainer": ("ortrain.compat.plain_trainer:extend",),
    "transformers.trainer_callback": ("ortrain.compat.plain_trainer:extend_callbacks",),
    "datasets.load": ("ortrain.compat.loading:extend",),
    "torch.onnx": ("ortrain.compat.exporting:extend",),
    "ortrain.ondevice.running.checkpoint": ("ortrain.compat.first_ondevice:extend_checkpoint",),
    "ortrain.ondevice.running.module": ("ortrain.compat.first_ondevice:extend_module",),
    # What old scripts find inside of an ORTModule.
    "ortrain.module": ("ortrain.compat.execution_manager:extend",),
}
