"""``ORTEncoder``: the encoder of a model of several files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.modeling_outputs import BaseModelOutput

from ortrain.deploy.models.inputs import Inputs, as_tensors
from ortrain.deploy.models.results import Results
from ortrain.deploy.models.session import Session
from ortrain.errors import UnsupportedInput, listing


class ORTEncoder:
    """The encoder of a model, called as that of transformers is.

    Args:
        session: its file.
        config: of the model.
        main_input_name: of the argument that a call begins with.
    """

    def __init__(self, session: Session, config: Any, main_input_name: str) -> None:
        self.session, self.config, self.main_input_name = session, config, main_input_name
        self._inputs = Inputs(session, config)
        self._results = Results(session, BaseModelOutput)
        if getattr(config, "model_type", "") == "whisper":
            # Its generate asks its first layers how many frames one state is made of.
            self.conv1, self.conv2 = SimpleNamespace(stride=(1,)), SimpleNamespace(stride=(2,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encodes a source, as ``forward`` does."""
        return self.forward(*args, **kwargs)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        input_features: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states of the source.

        Args:
            input_ids: int64 tokens, ``[batch, length]``.
            attention_mask: 1 for a token and 0 for padding, of the same shape.
            input_features: of speech, ``[batch, features, frames]``.
            kwargs: other inputs of the file.
        """
        for name in ("return_dict", "use_cache", "output_attentions", "output_hidden_states"):
            if kwargs.pop(name, None) and name.startswith("output"):
                raise UnsupportedInput(
                    f"{name}=True, but {self.session.path.name} gives "
                    f"{listing([*self.session.outputs], 12)} alone"
                )
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "input_features": input_features,
            **kwargs,
        }
        tensors, _ = as_tensors(given, self.session.device)
        return self._results.of(self.session.run(self._inputs.feeds(tensors)))
