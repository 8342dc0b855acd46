"""One lock for what only one thread of a process may do at a time.

Capturing patches torch while it traces, and onnx_ir numbers values in tables of the process; a
comparison with eager sets the random state and puts it back. Runs of what is built need no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

EXCLUSIVE = threading.RLock()


def this_thread() -> Callable[[], bool]:
    """A question that only the thread which made it answers with True.

    What is patched while a module is traced, all threads see, and those that train other modules
    must get torch's own.
    """
    own = threading.get_ident()
    return lambda: threading.get_ident() == own
