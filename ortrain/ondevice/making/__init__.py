"""What makes artifacts: `artifacts.generate_artifacts`, and the parts of it.

- Sources of a forward: `onnx_source`, `module_source`, `block` (of `onnxblock`) on a `base`.
- What is added to it: `losses`, adapters (`lora`), gradients and what cuts them into models
  (`models`, `forward`, `accumulate`, `barrier`), and updates: `optim` has optimizers as graphs.
"""

from ortrain.extras import require

require("onnx", __name__)
