"""A script: loads and runs what its standard input names, and prints the bytes that it took.

It imports nothing of ortrain, whose own memory would hide that of a small model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak() -> int:
    """Bytes of this process at its peak so far."""
    try:
        for line in _STATUS.read_text().splitlines():
            # ru_maxrss would be that of the process that started this one, where that is larger.
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # which Windows has not

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def main() -> None:
    """Answers ``{"bytes": …}``."""
    import numpy as np
    import onnxruntime

    asked = json.loads(sys.stdin.read())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if asked["threads"] is not None:
        options.intra_op_num_threads = asked["threads"]
    loaded = []
    for each in asked["files"]:
        with np.load(each["feeds"]) as arrays:
            loaded.append({name.removeprefix("input:"): arrays[name] for name in arrays.files})
    before = peak()
    sessions = []  # all of them stay, as where the model is served
    for each, feeds in zip(asked["files"], loaded, strict=True):
        session = onnxruntime.InferenceSession(
            each["model"], options, providers=[asked["provider"]]
        )
        sessions.append(session)
        session.run(None, feeds)
    print(json.dumps({"bytes": peak() - before}))


if __name__ == "__main__":
    main()
