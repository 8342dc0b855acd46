"""Training for quantization: a float model learns to bear the rounding that it is going to get.

Its weights and activations are rounded in the graph as the quantizer would round them, gradients go
straight through the rounding, and the weights are quantized afterwards by the same configuration.
"""
