"""``ORTGenerator``: text generation of a transformers model in onnxruntime, with a key-value cache.

The search is transformers' own: ``generate`` runs on a shallow copy of the model whose encoder and
forward are graphs. The cache is transformers' object too, over the tensors of onnxruntime, so that
beams are reordered as ever and a step that no graph serves runs in PyTorch on the same cache.
"""

from __future__ import annotations

from ortrain.extras import require

require("hf", __name__)

import copy
import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

from ortrain.config import DebugOptions, LogLevel, Options
from ortrain.deploy.cache_name import cache_name, take_cache
from ortrain.deploy.cached_decoder import CachedDecoder, Encoder, fill, states_of
from ortrain.errors import NotServed, OrtrainWarning
from ortrain.module import ORTModule, expect_options, unwrap
from ortrain.step.report import Report

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Outputs that the graphs do not have.
_NOT_SERVED = ("output_attentions", "output_hidden_states")
# Arguments of generate that ask for assisted generation.
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


@dataclass
class GenerationReport:
    """What ran the calls of ``generate``.

    Attributes:
        graph_calls: of which every run of the model was a graph.
        fallback_calls: of which some or all ran in PyTorch.
        encoder_runs: of the encoder's graph; 0 where the model has no encoder.
        decoder_runs: of the decoder's graph: one for each token, of a whole batch with its beams.
        torch_runs: of encoder and decoder in PyTorch, in calls that began in onnxruntime.
        reason: why the last call that ran in PyTorch did.
        encoder: on what was built of the encoder.
        decoder: on what was built of the decoder.
    """

    graph_calls: int = 0
    fallback_calls: int = 0
    encoder_runs: int = 0
    decoder_runs: int = 0
    torch_runs: int = 0
    reason: str = ""
    encoder: Report = field(default_factory=Report)
    decoder: Report = field(default_factory=Report)

    @property
    def captures(self) -> int:
        """How many times the encoder or the decoder was captured."""
        return self.encoder.captures + self.decoder.captures

    def __str__(self) -> str:
        calls = f"{self.graph_calls} calls in onnxruntime, {self.fallback_calls} in PyTorch"
        runs = f"{self.encoder_runs} of the encoder's graph, {self.decoder_runs} of the decoder's"
        rows = [
            f"generation: {calls}" + (f" ({self.reason})" if self.reason else ""),
            f"  runs      {runs}, {self.torch_runs} in PyTorch",
            f"  captures  {self.captures}",
        ]
        return "\n".join(rows)


class ORTGenerator:
    """Generates with a transformers model, its encoder and decoder running in onnxruntime.

    ::

        generator = ORTGenerator(model)
        tokens = generator.generate(**inputs, num_beams=4)

    The graphs read the model's weights where they are: what training changes holds at the next
    call, without a new capture. The model itself is not touched.

    Args:
        model: a model of an encoder and a decoder, or of a decoder alone; also an ORTModule around
            one. Anything else that has a ``generate`` generates in PyTorch.
        options: as for ORTModule; ``engine``, ``inference`` and ``arena`` mean nothing here.

    Attributes:
        model: the model.
        report: what ran where; ``print`` it.

    Raises:
        TypeError: ``model`` has no method ``generate``, or ``options`` are none.
    """

    def __init__(self, model: Any, *, options: Options | None = None) -> None:
        self.model = cast(Any, unwrap(model))
        if not callable(getattr(self.model, "generate", None)):
            raise TypeError(f"model: {type(self.model).__name__} has no method generate")
        expect_options(None, options)
        # The cache is larger at each token. An arena would keep every size that it ever had: 4.7 GB
        # for 384 tokens of a cache that holds 24 MiB in the end.
        options = options or Options()
        # onnxruntime multiplies float32 as it is.
        precision = None if options.precision == "bf16-products" else options.precision
        self.options = replace(
            options, engine="onnxruntime", inference=None, arena=False, precision=precision
        )
        quiet = DebugOptions(log_level=LogLevel.ERROR)  # one warning for both
        self._encoder = ORTModule(Encoder(self.model), quiet, options=self.options)
        self._decoder = ORTModule(CachedDecoder(self.model), quiet, options=self.options)
        self.report = GenerationReport(encoder=self._encoder.report, decoder=self._decoder.report)
        self._warned = False
        self._own = self.model.generate
        self._class_has_it = "generate" not in vars(self.model)
        # One object for all times: another would be a change of the model to whatever guards it.
        self._replacement = self.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as the model's ``generate`` does, with its arguments and its result.

        Raises:
            OrtrainError: the call cannot run as graphs, and the options allow no fallback.
        """
        report = self.report
        runs = report.encoder_runs + report.decoder_runs
        in_torch = report.torch_runs
        reason = self._reason(args, kwargs)
        if reason:
            self._refuse(reason)
            result = self._own(*args, **kwargs)
        else:
            result = type(self.model).generate(self._stand_in(), *args, **kwargs)
            if report.encoder_runs + report.decoder_runs == runs and report.torch_runs == in_torch:
                self._refuse(f"generate of {type(self.model).__name__} goes around its forward")
                reason = report.reason
        if reason or report.torch_runs > in_torch:
            report.fallback_calls += 1
            self._warn()
        else:
            report.graph_calls += 1
        return result

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """``model.generate`` is this generator's meanwhile."""
        self.model.generate = self._replacement
        try:
            yield
        finally:
            if self._class_has_it:
                del self.model.generate
            else:
                self.model.generate = self._own

    # -- what generate sees ----------------------------------------------------------------------

    def _stand_in(self) -> Any:
        """A shallow copy of the model that runs as graphs."""
        copied = _with_forward(self.model, self._forward)
        if self.model.config.is_encoder_decoder:
            encoder = _with_forward(self.model.get_encoder(), self._encode)

            def get_encoder(*args: Any, **kwargs: Any) -> Any:
                return self.model.get_encoder(*args, **kwargs) if args or kwargs else encoder

            copied.get_encoder = get_encoder
        return copied

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder's forward."""
        kwargs.pop("labels", None)  # of which it has no use, and with sizes of their own
        reason = _unserved(args, kwargs)
        if reason:
            self._in_torch(reason)
            return self.model.get_encoder()(*args, **kwargs)
        outputs = self._encoder(**kwargs)
        self.report.encoder_runs += self._served(self._encoder)
        return outputs

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, whose cache goes in and out as tensors."""
        cache = take_cache(kwargs)
        paired = self.model.config.is_encoder_decoder
        reason = _unserved(args, kwargs) or _unserved_cache(cache, paired)
        if reason:
            self._in_torch(reason)
            return self.model(*args, **{cache_name(): cache}, **kwargs)
        own = cache.self_attention_cache if paired else cache
        cross = states_of(cache.cross_attention_cache) if paired else []
        logits, past, computed = self._decoder(states_of(own), cross, **kwargs)
        self.report.decoder_runs += self._served(self._decoder)
        fill(own, past)
        if not paired:
            return CausalLMOutputWithPast(logits=logits, **{cache_name(): cache})
        if computed:
            fill(cache.cross_attention_cache, computed)
            layers = range(len(cache.cross_attention_cache))
            cache.is_updated.update(dict.fromkeys(layers, True))
        return Seq2SeqLMOutput(logits=logits, **{cache_name(): cache})

    # -- fallback --------------------------------------------------------------------------------

    def _reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a whole call runs in PyTorch; empty where it does not."""
        if not isinstance(self.model, PreTrainedModel):
            return f"{type(self.model).__name__} is not a transformers model"
        if not self._class_has_it:
            return "its method generate has been replaced"
        if self.model.training:
            return "the model is in training mode; call eval() first"
        if len(set(getattr(self.model, "hf_device_map", {}).values())) > 1:
            return "the model is spread over several devices"
        given = inspect.signature(self._own).bind(*args, **kwargs).arguments
        named = given | given.get("kwargs", {})
        sources = (given.get("generation_config"), self.model.generation_config)
        for name in _ASSISTED:
            values = [named.get(name), *[getattr(source, name, None) for source in sources]]
            if next((value for value in values if value is not None), False):
                return f"assisted generation ({name})"
        return "synced_gpus=True" if named.get("synced_gpus") else ""

    def _served(self, part: ORTModule) -> bool:
        """Whether the last run of a part was its graph; if not, the options allowed it."""
        served = part.report.mode == "graph"
        if not served:
            self.report.torch_runs += 1
            self.report.reason = part.report.reason
        return served

    def _in_torch(self, reason: str) -> None:
        self.report.torch_runs += 1
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        error = NotServed(f"{type(self.model).__name__} cannot generate as graphs here: {reason}")
        if not self.options.falls_back(error):
            raise error
        self.report.reason = reason

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ORTGenerator generates with {type(self.model).__name__} in PyTorch: "
                f"{self.report.reason}",
                OrtrainWarning,
                stacklevel=3,
            )


def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Any:
    """A shallow copy of a module with another forward, of the same signature, and without hooks."""
    copied: Any = copy.copy(module)
    # generate may have been replaced on the instance, by this very generator.
    vars(copied).pop("generate", None)
    vars(copied).update((name, OrderedDict()) for name in _HOOKS)
    copied.forward = functools.wraps(module.forward)(functools.partial(forward))
    return copied


def _unserved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call of the encoder or of the model runs in PyTorch; empty where it does not."""
    if args:
        return "its arguments are positional"
    return next((f"{name}=True" for name in _NOT_SERVED if kwargs.get(name)), "")


def _unserved_cache(cache: Any, paired: bool) -> str:
    """Why a call with this cache runs in PyTorch; empty where it does not."""
    if cache is None:
        return "there is no key-value cache"
    if isinstance(cache, EncoderDecoderCache) is not paired:
        return f"a {type(cache).__name__}"
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if paired else (cache,)
    for part in parts:
        if type(part) is not DynamicCache:
            return f"a {type(part).__name__}"
        if part.offloading:
            return "an offloaded cache"
        other = next((layer for layer in part.layers if type(layer) is not DynamicLayer), None)
        if other is not None:
            return f"a cache of {type(other).__name__}s"
    return ""
