"""What the front end needs of PyTorch beyond its public interface: one concern a file.

Each file says what it uses, and what serves without it; ``tests/pytorch/`` pins it.
"""

from ortrain.extras import require

require("torch", __name__)
