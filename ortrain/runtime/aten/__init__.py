"""Programs as generated Python functions of PyTorch's own operators."""

from ortrain.runtime.aten.executor import AtenCompiled, AtenExecutor

__all__ = ["AtenCompiled", "AtenExecutor"]
