"""The stock onnxruntime as an executor."""

from ortrain.runtime.onnxruntime.executor import Compiled, OnnxRuntimeExecutor

__all__ = ["Compiled", "OnnxRuntimeExecutor"]
