"""What an optimizer is to do: ``OptimizationConfig`` and its four levels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from ortrain.errors import OrtrainWarning, listing
from ortrain.kinds import expect, expect_flag, expect_whole

LEVELS = (0, 1, 2, 99)
# In what form onnxruntime's own scripts hand a mask to an attention. Ours is always added to the
# scores, as the graph has it, so that every value of a mask means the same as before.
_FORMS_OF_MASKS = ("use_mask_index", "no_attention_mask", "use_raw_attention_mask")


@dataclass
class OptimizationConfig:
    """Which rewrites an :class:`~ortrain.deploy.optimization.ORTOptimizer` makes.

    Attributes:
        optimization_level: of onnxruntime's own rewrites, which are made once and kept in the file:
            0 none, 1 those that hold everywhere, 2 also those of fused operators, 99 also layouts
            of this processor, so that the file is for machines of its kind alone.
        enable_transformers_specific_optimizations: the fusions of :mod:`.fusions`. They go by what
            a graph computes; there is no model that they are not for.
        optimize_for_gpu: the file is for CUDA. In one for a processor, sums stay apart from norms
            and GELUs, where the fused operators' kernels are slower (:mod:`.fusions.skip_norms`).
        fp16: weights and arithmetic become float16; inputs and outputs keep their types.
        disable_gelu_fusion: keeps spelled-out GELUs.
        disable_attention_fusion: keeps spelled-out attention.
        disable_bias_gelu_fusion: keeps a bias and its GELU apart.
        disable_layer_norm_fusion: keeps spelled-out layer and RMS norms.
        disable_rotary_embeddings: keeps spelled-out rotary embeddings.
        disable_skip_layer_norm_fusion: keeps a sum and the norm of it apart.
        disable_bias_skip_layer_norm_fusion: keeps a bias before these two apart.
        disable_skip_group_norm_fusion: likewise for group norms; onnxruntime's own, on CUDA.
        disable_bias_splitgelu_fusion: onnxruntime's own, on CUDA.
        disable_bias_add_fusion: onnxruntime's own, on CUDA.
        disable_group_norm_fusion: keeps spelled-out group norms.
        disable_embed_layer_norm_fusion: keeps sums of embeddings and the norm of them apart.
        enable_gemm_fast_gelu_fusion: onnxruntime's own, on ROCm.
        use_mask_index: has no effect: a mask is always added to the scores, as in the graph.
        disable_packed_kv: for cross attention on CUDA; ours never packs keys and values alone.
        no_attention_mask: has no effect: a mask that a model has is never dropped.
        use_raw_attention_mask: has no effect, as ``use_mask_index``.
        disable_shape_inference: asks for no shapes beyond those in the file; fusions that need
            others are not made.
        use_multi_head_attention: keeps the projections of an attention as products of their own
            (``MultiHeadAttention``), where else one operator has all (``Attention``).
        enable_gelu_approximation: computes GELUs by ``tanh``, which differs by up to 5e-4.
        use_group_norm_channels_first: for group norms, on CUDA.
        disable_packed_qkv: as ``use_multi_head_attention``.
        disable_nhwc_conv: for convolutions, on CUDA.

    Raises:
        TypeError: a field is of another kind.
        ValueError: there is no such level.
    """

    optimization_level: int = 1
    enable_transformers_specific_optimizations: bool = True
    optimize_for_gpu: bool = False
    fp16: bool = False
    disable_gelu_fusion: bool = False
    disable_attention_fusion: bool = False
    disable_bias_gelu_fusion: bool = False
    disable_layer_norm_fusion: bool = False
    disable_rotary_embeddings: bool = False
    disable_skip_layer_norm_fusion: bool = False
    disable_bias_skip_layer_norm_fusion: bool = False
    disable_skip_group_norm_fusion: bool = False
    disable_bias_splitgelu_fusion: bool = False
    disable_bias_add_fusion: bool = False
    disable_group_norm_fusion: bool = True
    disable_embed_layer_norm_fusion: bool = True
    enable_gemm_fast_gelu_fusion: bool = False
    use_mask_index: bool = False
    disable_packed_kv: bool = True
    no_attention_mask: bool = False
    use_raw_attention_mask: bool = False
    disable_shape_inference: bool = False
    use_multi_head_attention: bool = False
    enable_gelu_approximation: bool = False
    use_group_norm_channels_first: bool = False
    disable_packed_qkv: bool = False
    disable_nhwc_conv: bool = False

    def __post_init__(self) -> None:
        expect_whole("optimization_level", self.optimization_level)
        if self.optimization_level not in LEVELS:
            raise ValueError(
                f"optimization_level={self.optimization_level}: expected one of "
                f"{', '.join(map(str, LEVELS))}"
            )
        for field in fields(self):
            if field.name != "optimization_level":
                expect_flag(field.name, getattr(self, field.name))
        if ignored := [name for name in _FORMS_OF_MASKS if getattr(self, name)]:
            warnings.warn(
                f"{listing(ignored)}: a mask is added to the scores in whatever form the graph has "
                "it, and none is dropped, so that the answers stay; leave the option away",
                OrtrainWarning,
                stacklevel=3,
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OptimizationConfig:
        """The opposite of :meth:`to_dict`; fields that are missing have their defaults.

        Raises:
            ValueError: there is no field of a name.
        """
        expect("values", values, Mapping, "a dict of the fields")
        known = {field.name for field in fields(cls)}
        if strange := sorted(set(values) - known):
            raise ValueError(f"OptimizationConfig has no field {listing(strange)}")
        return cls(**values)


class AutoOptimizationConfig:
    """The four usual configurations.

    ========  ==========================  ============  ==================  =======
    level     onnxruntime's own rewrites  our fusions   GELU approximation  float16
    ========  ==========================  ============  ==================  =======
    ``O1``    1                           off           off                 off
    ``O2``    2                           on            off                 off
    ``O3``    2                           on            on                  off
    ``O4``    2                           on            on                  on, CUDA
    ========  ==========================  ============  ==================  =======
    """

    _LEVELS: ClassVar[dict[str, dict[str, Any]]] = {
        "O1": {"optimization_level": 1, "enable_transformers_specific_optimizations": False},
        "O2": {"optimization_level": 2, "enable_transformers_specific_optimizations": True},
        "O3": {
            "optimization_level": 2,
            "enable_transformers_specific_optimizations": True,
            "enable_gelu_approximation": True,
        },
        "O4": {
            "optimization_level": 2,
            "enable_transformers_specific_optimizations": True,
            "enable_gelu_approximation": True,
            "fp16": True,
        },
    }

    @classmethod
    def with_optimization_level(
        cls, optimization_level: str, for_gpu: bool = False, **kwargs: Any
    ) -> OptimizationConfig:
        """The configuration of a level.

        Args:
            optimization_level: ``"O1"`` to ``"O4"``.
            for_gpu: the file is for CUDA; with ``O4`` it always is.
            kwargs: other fields of :class:`OptimizationConfig`, which take precedence.

        Raises:
            TypeError: the level is no string, or there is no field of a name.
            ValueError: there is no such level.
        """
        expect("optimization_level", optimization_level, str, "one of 'O1', 'O2', 'O3', 'O4'")
        expect_flag("for_gpu", for_gpu)
        if optimization_level not in cls._LEVELS:
            raise ValueError(
                f"optimization_level={optimization_level!r}: expected one of "
                f"{', '.join(cls._LEVELS)}"
            )
        if optimization_level == "O4" and not for_gpu:
            warnings.warn(
                "O4 is for CUDA: its float16 is slower on a processor; optimize_for_gpu is set",
                OrtrainWarning,
                stacklevel=2,
            )
            for_gpu = True
        chosen = {"optimize_for_gpu": for_gpu, **cls._LEVELS[optimization_level], **kwargs}
        return OptimizationConfig(**chosen)

    @classmethod
    def O1(cls, for_gpu: bool = False, **kwargs: Any) -> OptimizationConfig:  # noqa: N802
        """Onnxruntime's own rewrites that hold everywhere."""
        return cls.with_optimization_level("O1", for_gpu, **kwargs)

    @classmethod
    def O2(cls, for_gpu: bool = False, **kwargs: Any) -> OptimizationConfig:  # noqa: N802
        """Also its fused operators, and our fusions."""
        return cls.with_optimization_level("O2", for_gpu, **kwargs)

    @classmethod
    def O3(cls, for_gpu: bool = False, **kwargs: Any) -> OptimizationConfig:  # noqa: N802
        """Also GELU by its approximation."""
        return cls.with_optimization_level("O3", for_gpu, **kwargs)

    @classmethod
    def O4(cls, for_gpu: bool = True, **kwargs: Any) -> OptimizationConfig:  # noqa: N802
        """Also float16, for CUDA."""
        return cls.with_optimization_level("O4", for_gpu, **kwargs)
