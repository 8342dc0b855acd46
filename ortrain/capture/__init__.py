"""From a graph of ATen operators to a :class:`~ortrain.program.Program`.

`translation` has :func:`~ortrain.capture.translation.program_of`, which is all of it:

- `fx`: the graph is cleaned, into operators that have a translation;
- `onnx`: translations of ATen operators, and programs made of what they give.

To both of them `origin` tells where in the user's code a node comes from, `traced` what a graph's
inputs and outputs are, `writes` what an operator writes to, and `refusal` why there is none; `call`
names the arguments of a call.
"""

from ortrain.extras import require

require("torch", __name__)
