"""A dispatch mode that loads no Dynamo.

Private: ``torch.utils._python_dispatch.TorchDispatchMode``, and its ``_should_skip_dynamo``: a mode
is kept from Dynamo by its decorator, which takes half a second to load it. Without that name it is
loaded at the first call.
"""

from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A mode for eager calls, that nothing compiles."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
