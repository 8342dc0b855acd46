"""Calls that stay PyTorch's: nodes of a graph that run the user's own code under autograd."""

from ortrain.extras import require

require("torch", __name__)
