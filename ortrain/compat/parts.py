"""What lies beside a model and makes its inputs: tokenizer, feature extractor, image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def preprocessors(folder: Path) -> dict[str, Any]:
    """Those that a folder, or the one that it is in, has: by their arguments of a pipeline.

    Args:
        folder: of the model, or ``onnx`` in it.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    kinds: dict[str, tuple[Any, str]] = {
        "tokenizer": (AutoTokenizer, "tokenizer_config.json"),
        "feature_extractor": (AutoFeatureExtractor, "preprocessor_config.json"),
        "image_processor": (AutoImageProcessor, "preprocessor_config.json"),
    }
    found = {}
    for name, (kind, file) in kinds.items():
        place = next((p for p in (folder, folder.parent) if (p / file).is_file()), None)
        if place is not None:
            try:
                found[name] = kind.from_pretrained(place)
            except (ImportError, OSError, ValueError, KeyError):  # of another kind
                continue
    return found
