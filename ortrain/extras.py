"""What is installed beside the core: a package that needs more says which extra has it.

The core (numpy, onnxruntime, safetensors) is what a device needs.
"""

from __future__ import annotations

import importlib.util

from ortrain.errors import MissingPackage

# Extra → the packages that it brings and that are imported; each has those before it as well.
EXTRAS = {
    "onnx": ("onnx", "onnx_ir", "onnxscript"),
    "torch": ("torch", "sympy"),
    "hf": ("transformers", "accelerate", "huggingface_hub"),
}


def require(extra: str, module: str) -> None:
    """Raises where an extra is not installed; to be called before anything of it is imported.

    Args:
        extra: its name.
        module: what needs it.

    Raises:
        MissingPackage: a package of it, or of one that it includes, is missing.
    """
    for name, packages in EXTRAS.items():
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise MissingPackage(
                    f"{module} needs the package {package!r}, which is not installed",
                    because=f"it comes with the extra {extra!r}",
                    help=f"pip install 'ortrain[{extra}]'",
                )
        if name == extra:
            return
