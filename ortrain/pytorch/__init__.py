"""What is asked of PyTorch beside computing: one concern a file.

A file that goes beyond the public interface says what it uses, and what serves without it;
``tests/pytorch/`` pins it.
"""

from ortrain.extras import require

require("torch", __name__)
