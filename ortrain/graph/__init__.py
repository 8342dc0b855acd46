"""Speaking ONNX fluently: building, typing, walking and checking graphs.

Knows nothing of torch or of gradients.
"""
