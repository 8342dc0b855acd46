"""One lock for what only one thread of a process may do at a time.

onnx_ir numbers values in tables of the process; a comparison with eager sets the random state and
puts it back. Runs of what is built need no lock.
"""

from __future__ import annotations

import threading

EXCLUSIVE = threading.RLock()
