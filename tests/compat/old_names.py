"""Old names as old scripts write them, by hand: what the table of names is held against."""

# Names of module, as ``from module import name`` has them.
OLD = """
torch_ort: ORTModule DebugOptions LogLevel set_seed ORTInferenceModule OpenVINOProviderOptions
torch_ort.optim: FusedAdam FP16_Optimizer
torch_ort.utils: LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler
torch_ort.utils.data: LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler
torch_ort.experimental.json_config: load_from_json
torch_ort.experimental: save_intermediate_onnx_graphs set_log_level LogLevel PropagateCastLevel
torch_ort.experimental: PropagateCastOpsStrategy set_propagate_cast_ops_optimization
torch_ort.experimental.debug: save_intermediate_onnx_graphs set_log_level
onnxruntime.training.ortmodule._logger: LogLevel
onnxruntime.capi._pybind_state: set_arena_extend_strategy ArenaExtendStrategy set_cuda_mem_limit
onnxruntime.capi._pybind_state: set_cuda_device_id get_mpi_context_local_rank
onnxruntime.capi._pybind_state: get_mpi_context_local_size get_mpi_context_world_rank
onnxruntime.capi._pybind_state: get_mpi_context_world_size
torch_ort.experimental.graph_config: PropagateCastLevel set_propagate_cast_ops_optimization
torch_ort.configure: build_torch_cpp_extensions
onnxruntime: set_seed
onnxruntime.training: ORTModule is_ortmodule_available artifacts onnxblock api optim amp utils
onnxruntime.training: ortmodule experimental GradientGraphBuilder
onnxruntime.training.ortmodule: ORTModule DebugOptions LogLevel ONNX_OPSET_VERSION TORCH_CPP_DIR
onnxruntime.training.ortmodule: MINIMUM_RUNTIME_PYTORCH_VERSION_STR _fallback
onnxruntime.training.ortmodule: ORTMODULE_FALLBACK_POLICY ORTMODULE_FALLBACK_RETRY
onnxruntime.training.ortmodule.ortmodule: ORTModule
onnxruntime.training.ortmodule.options: DebugOptions LogLevel
onnxruntime.training.ortmodule.debug_options: DebugOptions LogLevel
onnxruntime.training.ortmodule._fallback: _FallbackPolicy ORTModuleFallbackException
onnxruntime.training.ortmodule._fallback: ORTModuleIOError ORTModuleTorchModelException
onnxruntime.training.ortmodule.torch_cpp_extensions: is_installed
onnxruntime.training.ortmodule._fallback_exceptions: ORTModuleFallbackException
onnxruntime.training.ortmodule._fallback_exceptions: ORTModuleInitException ORTModuleIOError
onnxruntime.training.ortmodule._fallback_exceptions: ORTModuleDeviceException
onnxruntime.training.ortmodule._fallback_exceptions: ORTModuleTorchModelException
onnxruntime.training.ortmodule._fallback_exceptions: ORTModuleONNXModelException
onnxruntime.training.ortmodule._custom_autograd_function: enable_custom_autograd_support
onnxruntime.training.ortmodule.experimental.json_config: load_from_json
onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule: HierarchicalORTModule
onnxruntime.training.ortmodule.torch_cpp_extensions.install: build_torch_cpp_extensions
onnxruntime.training.optim: FusedAdam AdamWMode FP16_Optimizer
onnxruntime.training.optim.fused_adam: FusedAdam AdamWMode
onnxruntime.training.optim.fp16_optimizer: FP16_Optimizer
onnxruntime.training.utils: log_memory_usage torch_nvtx_range_push torch_nvtx_range_pop PTable
onnxruntime.training.utils: nvtx_function_decorator extract_data_and_schema
onnxruntime.training.utils: unflatten_data_using_schema ORTModelInputOutputType
onnxruntime.training.utils.ptable: PTable
onnxruntime.training.utils.data: LoadBalancingDistributedSampler
onnxruntime.training.utils.data: LoadBalancingDistributedBatchSampler
onnxruntime.training.utils.hooks: GlobalSubscriberManager StatisticsSubscriber SubscriberBase
onnxruntime.training.utils.hooks: _InspectActivation
onnxruntime.training.utils.hooks: SubscriberManager inspect_activation no_increase_global_step
onnxruntime.training.utils.hooks.merge_activation_summary: main
onnxruntime.training.api: CheckpointState Module Optimizer LinearLRScheduler
onnxruntime.training.api.checkpoint_state: CheckpointState
onnxruntime.training.artifacts: generate_artifacts LossType OptimType
onnxruntime.training.onnxblock: base empty_base Block ForwardBlock TrainingBlock blocks loss optim
onnxruntime.training.onnxblock: custom_op_library save_checkpoint load_checkpoint_to_model
onnxruntime.training.onnxblock.blocks: Add Sub Mul Div Pow ReduceMean ReduceSum Sigmoid Log Neg Abs
onnxruntime.training.onnxblock.blocks: Constant SequenceConstruct ReduceAllL2 Clip PassThrough
onnxruntime.training.onnxblock.blocks: InputLike LabelEncoder Cast Linear Block
onnxruntime.training.onnxblock: TrainingModel onnx_model
onnxruntime.training.onnxblock.model: TrainingModel onnx_model
onnxruntime.training.onnxblock.building_blocks: Add Sub Mul Div Pow ReduceMean
onnxruntime.training.onnxblock.loss: MSELoss CrossEntropyLoss BCEWithLogitsLoss L1Loss
onnxruntime.training.onnxblock.optim: AdamW SGD ClipGradNorm
onnxruntime.training.experimental: export_gradient_graph
onnxruntime.capi._pybind_state: GradientGraphBuilder get_optimized_model InferenceSession
onnxruntime.capi._pybind_state: is_triton_enabled is_torch_interop_default_on has_collective_ops
optimum.onnxruntime: ORTTrainer ORTSeq2SeqTrainer ORTTrainingArguments ORTSeq2SeqTrainingArguments
optimum.onnxruntime: ORTModelForCausalLM ORTModelForSequenceClassification ORTModelForSeq2SeqLM
optimum.onnxruntime: ORTModelForSpeechSeq2Seq ORTModelForFeatureExtraction ORTModelForMaskedLM
optimum.onnxruntime.modeling_ort: ORTModelForQuestionAnswering ORTModelForTokenClassification
optimum.onnxruntime.modeling_decoder: ORTModelForCausalLM
optimum.onnxruntime.modeling_seq2seq: ORTModelForSeq2SeqLM
optimum.onnxruntime: ORTOptimizer ORTQuantizer ORTConfig OptimizationConfig QuantizationConfig
optimum.onnxruntime: AutoOptimizationConfig AutoQuantizationConfig CalibrationConfig
optimum.onnxruntime: AutoCalibrationConfig QuantizationMode ORTQuantizableOperator
optimum.onnxruntime.configuration: ORTConfig OptimizationConfig AutoOptimizationConfig
optimum.onnxruntime.configuration: QuantizationConfig AutoQuantizationConfig QuantizationMode
optimum.onnxruntime.configuration: CalibrationConfig AutoCalibrationConfig
optimum.onnxruntime.optimization: ORTOptimizer
optimum.onnxruntime.quantization: ORTQuantizer ORTCalibrationDataReader
optimum.onnxruntime.preprocessors: PreprocessorPass QuantizationPreprocessor
optimum.onnxruntime.preprocessors.passes: ExcludeGeLUNodes ExcludeLayerNormNodes ExcludeNodeAfter
optimum.onnxruntime.preprocessors.passes: ExcludeNodeFollowedBy IncludeFullyConnectedNodes
optimum.onnxruntime.trainer: ORTTrainer ModuleWithLoss
optimum.onnxruntime.trainer_seq2seq: ORTSeq2SeqTrainer
optimum.onnxruntime.training_args: ORTTrainingArguments ORTOptimizerNames
optimum.onnxruntime.training_args_seq2seq: ORTSeq2SeqTrainingArguments
optimum.onnxruntime.utils: is_onnxruntime_training_available
transformers: AdamW MT5Tokenizer MT5TokenizerFast TRANSFORMERS_CACHE is_torch_tpu_available
transformers: is_flax_available is_safetensors_available is_tf_available
transformers.utils: send_example_telemetry is_offline_mode is_torch_tpu_available TRANSFORMERS_CACHE
transformers.utils: check_min_version PaddingStrategy
transformers.utils.versions: require_version
transformers.file_utils: is_offline_mode is_torch_tpu_available
transformers.optimization: AdamW get_scheduler
transformers.modeling_utils: apply_chunking_to_forward prune_linear_layer
transformers.trainer_utils: EvaluationStrategy get_last_checkpoint is_main_process
transformers.testing_utils: CaptureLogger
transformers.tokenization_utils_base: PreTrainedTokenizerBase
transformers.deepspeed: HfDeepSpeedConfig is_deepspeed_zero3_enabled deepspeed_config
datasets: load_metric load_dataset ClassLabel DatasetDict
"""
# Those of the trainers of 2020.
CLASSIC = """
onnxruntime.capi.ort_trainer: ORTTrainer IODescription ModelDescription LossScaler
onnxruntime.capi.ort_trainer: save_checkpoint load_checkpoint
onnxruntime.training: ORTTrainer ORTTrainerOptions TrainStepInfo checkpoint _utils orttrainer
onnxruntime.training.orttrainer: ORTTrainer TrainStepInfo ORTTrainerOptions
onnxruntime.training.orttrainer_options: ORTTrainerOptions
onnxruntime.training.amp: LossScaler DynamicLossScaler
onnxruntime.training.amp.loss_scaler: LossScaler DynamicLossScaler
onnxruntime.training.optim: AdamConfig LambConfig SGDConfig LinearWarmupLRScheduler lr_scheduler
onnxruntime.training.optim.config: AdamConfig LambConfig SGDConfig _OptimizerConfig
onnxruntime.training.optim.lr_scheduler: _LRScheduler
onnxruntime.training.optim.lr_scheduler: ConstantWarmupLRScheduler CosineWarmupLRScheduler
onnxruntime.training.optim.lr_scheduler: LinearWarmupLRScheduler PolyWarmupLRScheduler
onnxruntime.training.checkpoint: aggregate_checkpoints
onnxruntime.capi.training: ORTTrainer ORTTrainerOptions
onnxruntime.capi.training.optim: AdamConfig LambConfig SGDConfig
"""
# Those that raise, with a reason and a way on.
GONE = """
onnxruntime.training: TrainingParameters TrainingSession ort_triton
onnxruntime.capi.training.training_session: TrainingSession
onnxruntime.training.ortmodule: register_graph_optimizer
onnxruntime.training.ortmodule._custom_op_symbolic_registry: register_symbolic
onnxruntime.training.ortmodule._custom_gradient_registry: register_gradient
onnxruntime.training.ortmodule.experimental.pipe: ORTPipelineModule
onnxruntime.training.ortmodule.graph_optimizers.utils: GraphMatcher
onnxruntime.training.ort_triton: register_triton_kernel call_triton_by_name
onnxruntime.training.utils.hooks: configure_ort_compatible_zero_stage3 ZeROOffloadSubscriber
onnxruntime.training.experimental.exporter: _export_jit_graph_to_onnx_model_proto
optimum.onnxruntime: ORTModelForSemanticSegmentation ORTModelForCustomTasks
optimum.onnxruntime: ORTStableDiffusionPipeline
"""


def pairs(text: str) -> list[tuple[str, str]]:
    """Module and name of each."""
    rows = [line.split(":") for line in text.strip().splitlines()]
    return [(module, name) for module, names in rows for name in names.split()]
