"""Calls that stay PyTorch's: nodes of a graph that run the user's own code under autograd."""
