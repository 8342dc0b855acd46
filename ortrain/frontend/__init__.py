"""The front end on Dynamo: what ``torch.compile(model, backend="ortrain")`` does with a graph.

Dynamo traces a model's code and hands over graphs of PyTorch's functions (:mod:`.backend`). Each
becomes a graph of ATen operators with what such a trace forgets (:mod:`.aten`), then a program
(:mod:`.program`), then a step that takes weights and buffers as arguments at every call.
"""

from ortrain.extras import require

require("torch", __name__)
