"""Programs as generated Python functions of PyTorch's own operators.

- `executor` compiles a program: `lowering` prepares it, with `narrowing` and `products`, `refusals`
  says what it cannot. `writer` writes the `lines` of its function as the `kernels` of the `table`
  say, of `operands`, by what is known of `operators`. Sizes are Python numbers: `host`,
  `size_rules`, `inside`. `memory` plans over the lines.
- What the function calls beside PyTorch, by the names in `modules`: `attention` and `flash`,
  `blas`, `control`, `draws` with their `hash`, `late` sizes, `recurrent`, `resampling`, `rows`.
- `graphs` records it on a GPU; `exchange` is for the step, which gives and takes tensors.
"""

from ortrain.extras import require

require("torch", __name__)

from ortrain.runtime.aten import kernels  # they fill the table
from ortrain.runtime.aten.executor import AtenCompiled, AtenExecutor

__all__ = ["AtenCompiled", "AtenExecutor", "kernels"]
