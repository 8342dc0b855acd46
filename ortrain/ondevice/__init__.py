"""On-device training: artifacts of standard ONNX operators that any stock onnxruntime trains.

Making artifacts needs all that ortrain depends on. Running them needs numpy, onnxruntime and
safetensors alone: neither torch nor onnx is imported.
"""
