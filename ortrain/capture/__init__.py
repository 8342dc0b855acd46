"""From a ``torch.nn.Module`` to a :class:`~ortrain.program.Program`."""

from ortrain.extras import require

require("torch", __name__)
