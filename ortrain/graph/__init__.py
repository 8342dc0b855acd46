"""Speaking ONNX fluently: building, typing, walking and checking graphs.

Knows nothing of torch or of gradients.
"""

from ortrain.extras import require

require("onnx", __name__)
