"""On-device training: artifacts of standard ONNX operators that any stock onnxruntime trains.

Making artifacts needs the whole of ortrain's dependencies. Running them needs numpy, onnxruntime and
safetensors alone: neither torch nor onnx is imported.
"""
