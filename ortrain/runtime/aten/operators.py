"""What is known of ATen operators by their names: what they share, and what they give."""

from __future__ import annotations

# Operators that return (or may return) a view of their first operand.
VIEWS = frozenset(
    """
    view reshape expand permute transpose t unsqueeze squeeze select narrow flatten unflatten
    split_with_sizes split unbind chunk detach diagonal movedim contiguous to as_strided view_as
    expand_as slice float unfold pixel_shuffle pixel_unshuffle
    resize
    """.split()
)
# Operators whose result has the broadcast shape of their operands, and their dtype.
ARITHMETIC = frozenset(
    """
    add sub mul div rsub neg exp log sqrt rsqrt reciprocal abs erf relu sigmoid tanh masked_fill
    maximum minimum clamp silu gelu floor ceil round sign sin cos remainder fmod addcmul addcdiv
    threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward clone contiguous
    square bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift
    tan asin acos atan sinh cosh asinh acosh atanh expm1 log1p xlogy leaky_relu elu celu mish
    hardsigmoid hardswish softplus hardshrink softshrink threshold _prelu_kernel softmax log_softmax
    cumsum cumprod flip mish_backward elu_backward softplus_backward leaky_relu_backward
    hardswish_backward hardtanh_backward
    """.split()
)
# Operators whose result has the broadcast shape of their operands.
ELEMENTWISE = ARITHMETIC | frozenset(
    """
    pow where eq ne lt le gt ge logical_and logical_or logical_not logical_xor to float lerp isnan
    isinf isposinf isneginf detach zeros_like ones_like
    """.split()
)
# Of these the ones that go along an axis: the others know nothing of one element from another.
ALONG_AN_AXIS = frozenset("softmax log_softmax cumsum cumprod flip".split())
# Operators whose result is contiguous, however their operands lie.
CONTIGUOUS = frozenset(
    """
    mm addmm bmm baddbmm matmul linear contiguous stack native_layer_norm zeros full embedding
    index_select tensor arange embedding_dense_backward nll_loss_forward new_zeros
    native_layer_norm_backward
    """.split()
)
# The second operand of these may be a number.
TAKES_NUMBERS = frozenset(
    """
    add sub mul div eq ne lt le gt ge pow where masked_fill remainder fmod bitwise_and bitwise_or
    bitwise_xor
    """.split()
)
