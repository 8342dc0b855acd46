"""From a ``torch.nn.Module`` to a :class:`~ortrain.program.Program`."""
