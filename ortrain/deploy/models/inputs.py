"""From the arguments of a call to the inputs of a file: what is missing is made, nothing is lost.

A file may take fewer inputs than the model of transformers that it was made of, or more than a
tokenizer gives. What is missing is made as the model would make it; what is too much is left out
where it says what the file does anyway, such as a mask of ones, and refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ortrain.deploy.models.session import Session, converted
from ortrain.errors import InputError, UnsupportedInput, listing
from ortrain.kinds import refused

MASKS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask", "pixel_mask")
POSITIONS = ("position_ids", "decoder_position_ids", "cache_position")
MAIN = ("input_ids", "decoder_input_ids", "pixel_values", "input_values", "input_features")
_EMBEDDED = ("inputs_embeds", "decoder_inputs_embeds")

# Models that count positions from the padding token's on, and only where there is no padding.
_BEHIND_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# Models that count them of the mask, where a file takes what they have counted.
_BY_THE_MASK = {"opt"}
# Models that make positions of the mask themselves, or read the distances of tokens alone.
_OF_THE_MASK = {"bloom", "falcon", "mpt", "opt", "xglm"}
# Arguments that the model of transformers takes and does not read.
_UNREAD = {("whisper", "attention_mask"), ("whisper", "encoder_attention_mask")}


def as_tensors(given: Mapping[str, Any], device: torch.device) -> tuple[dict[str, Any], bool]:
    """The call's arguments with numpy arrays as tensors over their memory, without those of None.

    Args:
        given: the arguments by name.
        device: of the model.

    Returns:
        The arguments, and whether the arrays among them are numpy's, all of them.

    Raises:
        TypeError: an argument is neither an array nor a tensor.
        UnsupportedInput: a tensor is on another device, or asks for a gradient.
    """
    tensors: dict[str, Any] = {}
    arrays = torches = 0
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor):
            torches += 1
            if value.device != device:
                raise UnsupportedInput(
                    f"{name} is on {value.device}, the model on {device}",
                    help=f"pass {name}.to({str(device)!r}), or load the model with the provider "
                    "of that device; to train there, wrap the PyTorch model in ortrain.ORTModule",
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise UnsupportedInput(
                    f"{name} requires a gradient",
                    because="an exported file computes none, and its result would be cut off",
                    help="call it in torch.no_grad(); to train, wrap the PyTorch model in "
                    "ortrain.ORTModule",
                )
            tensors[name] = value
        elif isinstance(value, np.ndarray):
            arrays += 1
            tensors[name] = _tensor(name, value, device)
        else:
            raise refused(name, value, "a torch.Tensor or a numpy array")
    return tensors, arrays > 0 and not torches


def _tensor(name: str, array: np.ndarray, device: torch.device) -> torch.Tensor:
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()  # torch lies over nothing else
    try:
        tensor = torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(
            f"{name} is an array of {array.dtype}, which torch does not have"
        ) from error
    return tensor if device.type == "cpu" else tensor.to(device)


class Inputs:
    """What one file takes.

    Args:
        session: the file.
        config: of the model: its kind, and its padding token.
    """

    def __init__(self, session: Session, config: Any) -> None:
        self.session, self.config = session, config
        self.values = session.inputs
        self._kind = str(getattr(config, "model_type", ""))

    def feeds(
        self, given: Mapping[str, torch.Tensor], past: int = 0, source: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The file's inputs, but for those of a cache.

        Args:
            given: tensors by name.
            past: how many tokens the cache holds.
            source: how many states the encoder has given, where a cache has them alone.

        Raises:
            InputError: an input is missing and has no default.
            UnsupportedInput: the file cannot take an argument, and that would change its answer.
        """
        feeds = {}
        for name, tensor in given.items():
            value = self.values.get(name)
            if value is None:
                self._leave_out(name, tensor, given, past)
            else:
                feeds[name] = (
                    tensor if tensor.dtype is value.dtype else converted(name, tensor, value)
                )
        if len(feeds) < len(self.values):
            for name, value in self.values.items():
                if name not in feeds and not _is_of_cache(name):
                    made = self._made(name, given, past, source)
                    feeds[name] = made if made.dtype is value.dtype else made.to(value.dtype)
        return feeds

    # -- what is missing -------------------------------------------------------------------------

    def _made(
        self, name: str, given: Mapping[str, torch.Tensor], past: int, source: int | None
    ) -> torch.Tensor:
        shape, device = _sizes(given)
        if shape is not None:
            if name in ("attention_mask", "decoder_attention_mask"):
                return torch.ones(*shape[:-1], past + shape[-1], dtype=torch.int64, device=device)
            if name == "encoder_attention_mask":
                states = given.get("encoder_hidden_states")
                length = source if states is None else states.shape[1]
                if length is not None:
                    return torch.ones(shape[0], length, dtype=torch.int64, device=device)
            if name == "token_type_ids":
                return torch.zeros(shape, dtype=torch.int64, device=device)
            if name in POSITIONS:
                positions = self._positions(given, past)
                return positions[0] if name == "cache_position" else positions.expand(shape)
        raise InputError(
            f"{self.session.path.name} needs {name}, which the call does not give",
            because=f"the call gives {listing([*given], 12)}" if given else "",
            help=f"pass {name}=…; a file of another task looks like this too",
        )

    def _positions(self, given: Mapping[str, torch.Tensor], past: int) -> torch.Tensor:
        """As the model counts them where the call does not say."""
        shape, device = _sizes(given)
        assert shape is not None
        ids, padding = given.get("input_ids"), getattr(self.config, "pad_token_id", None)
        if self._kind in _BEHIND_PADDING and padding is not None:
            if ids is None:
                return torch.arange(padding + 1, padding + 1 + shape[-1], device=device)[None]
            real = ids.ne(padding).long()
            return real.cumsum(-1) * real + padding
        mask = given.get("attention_mask")
        if self._kind in _BY_THE_MASK and mask is not None and mask.ndim == 2:
            return (mask.long().cumsum(-1) * mask.long() - 1)[:, past:]
        return torch.arange(past, past + shape[-1], device=device)[None]

    # -- what is too much ------------------------------------------------------------------------

    def _leave_out(
        self, name: str, tensor: torch.Tensor, given: Mapping[str, torch.Tensor], past: int
    ) -> None:
        """Raises where an argument that the file does not take would have changed the answer."""
        if name in self.session.unread or (self._kind, name) in _UNREAD:
            return
        if name in MASKS:
            why = "" if bool(tensor.all()) else "some of its tokens are masked"
        elif name == "token_type_ids":
            why = "some of them are not 0" if bool(tensor.any()) else ""
        elif name in POSITIONS:
            why = "" if self._counts_so(tensor, given, past) else "they do not count the tokens"
        elif name == "labels":
            raise UnsupportedInput(
                f"{self.session.path.name} computes no loss of labels",
                help="leave labels out; to train, wrap the PyTorch model in ortrain.ORTModule",
            )
        else:
            why = "it is no default of the model either"
        if why:
            raise UnsupportedInput(
                f"{self.session.path.name} takes no {name}, and {why}",
                because=f"the file takes {listing([*self.values], 12)}",
                help=f"leave {name} out, or export the model again with it",
            )

    def _counts_so(
        self, tensor: torch.Tensor, given: Mapping[str, torch.Tensor], past: int
    ) -> bool:
        """Whether positions are those that the file counts by itself, or as good."""
        shape, _ = _sizes(given)
        if shape is None or tensor.shape[-1] != shape[-1]:
            return False
        if bool((tensor == self._positions(given, past)).all()):
            return True
        mask = given.get("attention_mask")
        relative = getattr(self.config, "rope_parameters", None) is not None
        if mask is None or mask.ndim != 2 or not (relative or self._kind in _OF_THE_MASK):
            return False
        # Counted from a padded row's first token on, which leaves all distances as they are.
        counted = (mask.long().cumsum(-1) - 1)[:, -shape[-1] :]
        return bool(((tensor == counted) | (mask[:, -shape[-1] :] == 0)).all())


def _sizes(given: Mapping[str, torch.Tensor]) -> tuple[torch.Size | None, torch.device]:
    """Rows and tokens of a call, choices in between where there are any."""
    for name in ("decoder_input_ids", "input_ids", "input_values"):
        if name in given:
            return given[name].shape, given[name].device
    for name in _EMBEDDED:
        if name in given:
            return given[name].shape[:-1], given[name].device
    return None, torch.device("cpu")


def _is_of_cache(name: str) -> bool:
    return name.startswith(("past_key_values.", "use_cache_branch"))
