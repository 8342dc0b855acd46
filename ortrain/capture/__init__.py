"""From a ``torch.nn.Module`` to a :class:`~ortrain.program.Program`.

`export` has :func:`~ortrain.capture.export.capture`, which is all of it. Each folder may import
those above it, and none below:

- `trace`: ``torch.export`` runs the module's Python code once, and what it cannot follow is
  refused;
- `onnx`: translations of ATen operators, and programs made of what they give;
- `fx`: the exported graph is cleaned between the two, into operators that have a translation.

`origin` tells where in the user's code a node comes from, to all of them.
"""

from ortrain.extras import require

require("torch", __name__)
