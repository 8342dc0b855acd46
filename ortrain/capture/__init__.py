"""From a ``torch.nn.Module`` to a :class:`~ortrain.program.Program`.

`export` has :func:`~ortrain.capture.export.capture`, which is all of it. Each folder may import
those above it, and none below:

- `trace`: ``torch.export`` runs the module's Python code once, and what it cannot follow is
  refused;
- `onnx`: translations of ATen operators, and programs made of what they give;
- `fx`: the exported graph is cleaned between the two, into operators that have a translation.

To all of them `origin` tells where in the user's code a node comes from, `traced` what a graph's
inputs and outputs are, `returned` which outputs are no new tensors, and `writes` what an operator
writes to.
"""

from ortrain.extras import require

require("torch", __name__)
