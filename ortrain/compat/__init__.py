"""Old imports resolve: scripts for ``torch_ort``, ``onnxruntime.training`` and Optimum run as is.

One line at the top of a script, or a command in front of it::

    import ortrain.compat

    python -m ortrain.compat script.py …
    ortrain run script.py …

What each old name is now stands in :mod:`ortrain.compat.table`. Names that an installed package
has stay its own; only those that it lacks are added. Importing this package loads neither torch nor
transformers nor onnxruntime.
"""

from __future__ import annotations

from ortrain.compat.finder import install

__all__ = ["install"]

install()
