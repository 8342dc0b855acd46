"""Sessions of onnxruntime whose values are handed over by reference.

Private: ``onnxruntime.capi._pybind_state``: its ``OrtValue`` and ``OrtValueVector``, and ``_sess``
of a session, whose ``run_with_ortvaluevector`` runs on them. 6 outputs take 6.4 us a run, and 2 us
to be handed to PyTorch, against 43 us through ``IOBinding``. Without them the engine fails to load.
"""

from __future__ import annotations

from typing import Any

import onnxruntime
from onnxruntime.capi import _pybind_state as native

OrtValue: Any = native.OrtValue
OrtValueVector: Any = native.OrtValueVector
OrtDevice: Any = native.OrtDevice


def runner_of(session: onnxruntime.InferenceSession) -> Any:
    """What runs a session on vectors of values: options, names, feeds, names, fetches, devices."""
    return session._sess.run_with_ortvaluevector


def value_of(array: Any) -> Any:
    """An ``OrtValue`` over the memory of a contiguous array of NumPy, which it does not hold."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)._ortvalue
