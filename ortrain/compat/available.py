"""What scripts ask transformers for, and it no longer answers: frameworks that it left behind."""

from __future__ import annotations


def is_flax_available() -> bool:
    """False: transformers no longer runs on Flax."""
    return False


def is_tf_available() -> bool:
    """False: transformers no longer runs on TensorFlow."""
    return False


def is_safetensors_available() -> bool:
    """True: transformers does not install without it."""
    return True


def is_torch_tpu_available(check_device: bool = True) -> bool:
    """Whether PyTorch computes on a TPU.

    Args:
        check_device: also asks for a device, not only for the package torch_xla.
    """
    from transformers.utils.import_utils import is_torch_xla_available

    return bool(is_torch_xla_available(check_is_tpu=check_device))
