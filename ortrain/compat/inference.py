"""``ORTInferenceModule``: a module whose forward runs in onnxruntime, without gradients."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from dataclasses import dataclass
from typing import Any

import onnxruntime
import torch
from torch import nn

from ortrain.config import DebugOptions, Options
from ortrain.errors import NotServed
from ortrain.module import ORTModule

_OPENVINO = "OpenVINOExecutionProvider"


@dataclass
class OpenVINOProviderOptions:
    """What OpenVINO computes on.

    Attributes:
        provider: ``"openvino"``.
        backend: ``"CPU"``.
        precision: ``"FP32"``.

    Raises:
        NotServed: another backend or precision.
    """

    provider: str = "openvino"
    backend: str = "CPU"
    precision: str = "FP32"

    def __post_init__(self) -> None:
        given = (self.provider, self.backend.upper(), self.precision.upper())
        if given != ("openvino", "CPU", "FP32"):
            raise NotServed(
                f"OpenVINO on {self.backend} in {self.precision} is not served",
                because="tensors come from PyTorch on the CPU, in float32",
                help="take OpenVINOProviderOptions() as it is",
            )


class ORTInferenceModule(ORTModule):
    """Calls a module in a session of onnxruntime, always without gradients.

    Args:
        module: the module.
        debug_options: logging, and graphs written as ONNX files.
        provider_options: those of OpenVINO; without them the module's own device runs it.
        options: ortrain's own, in their place.

    Raises:
        NotServed: the installed onnxruntime has no OpenVINO.
    """

    def __init__(
        self,
        module: nn.Module,
        debug_options: DebugOptions | None = None,
        provider_options: OpenVINOProviderOptions | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        provider = None if provider_options is None else _OPENVINO
        if provider is not None and provider not in onnxruntime.get_available_providers():
            raise NotServed(
                "the installed onnxruntime has no OpenVINO",
                because=f"it has {', '.join(onnxruntime.get_available_providers())}",
                help="pip install onnxruntime-openvino, or leave provider_options out",
            )
        given = options or Options(engine="onnxruntime", provider=provider)
        super().__init__(module, debug_options, options=given)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; same arguments, same results, no gradients."""
        with torch.no_grad():
            return super().forward(*args, **kwargs)
