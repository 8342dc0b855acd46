"""The calls in a graph that switch gradients and autocast on and off.

Private: the functions that Dynamo and ``make_fx`` write into a graph for ``torch.no_grad`` and
``torch.autocast``. Without their names a graph would lose these regions, so that the import fails.
"""

from torch import _C
from torch.amp import autocast_mode

SET_GRADIENTS = _C._set_grad_enabled
ENTER_AUTOCAST = autocast_mode._enter_autocast
EXIT_AUTOCAST = autocast_mode._exit_autocast
