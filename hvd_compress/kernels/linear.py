"""Linear quantization of blocks, with zero always among the levels.

A block with minimum m and maximum M gets levels (base + code) * step, code = 0 ... L = 2**bits - 1. The step is
(M - m) / L and base = round(m / step) is an integer, so that zero is a level exactly: every level is a multiple of the
step. The range [base - 1/2, base + L + 1/2] * step is one step wider than [m, M] and therefore still covers it: the
error of nearest rounding stays at most step / 2. Because zero is a level, the error is also at most |x|, which makes
the quantizer a contraction, as error feedback requires (Karimireddy et al. 2019, Assumption A).

Stochastic rounding needs levels at or beyond both ends, so its step is (M - m) / (L - 1) (with one
bit: levels m and M). It is then unbiased, and its step is at most max|x| / s with s = 2**(bits - 1)
- 1, so that QSGD's variance bounds hold with that s (Alistarh et al. 2017, Lemma 3.1).
"""

from __future__ import annotations

import tensorflow as tf

from . import blocks as _blocks

# Below this step, 1 / step would overflow. Such blocks (all values under 1e-34) decode to zero.
_TINY = 2.0**-120
# From this step on, 1 / step is subnormal, which XLA treats as zero. Such blocks (of few bits, with values
# over 4e37) decode to zero, and so do blocks whose outermost level would be infinite.
_HUGE = 2.0**126
# The smallest step relative to the largest magnitude: smaller ones could not be told apart in float32.
_RESOLUTION = 2.0**-22
# Adding this to a float32 of small magnitude rounds it to an integer, in the lowest bits of the sum. Rounding and
# conversion are faster in this way.
_MAGIC = 1.5 * 2.0**23
_SIGN_OFF = 0x7FFFFFFF
_INFINITY = 0x7F800000


def extremes(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The smallest and the largest value of each row, float32 [rows, 1], and whether all are finite.

    Values are compared as integers that have the same order as floats, with infinities and NaN at both ends. As floats,
    XLA's maximum would ignore NaN.
    """
    keys = _ordered(tf.bitcast(values, tf.int32))
    low = _blocks.halving(keys, tf.minimum)
    high = _blocks.halving(keys, tf.maximum)
    finite = tf.reduce_all((high < _INFINITY) & (low > _ordered(tf.constant(_INFINITY - 2**31, tf.int32))))
    return tf.bitcast(_ordered(low), tf.float32), tf.bitcast(_ordered(high), tf.float32), finite


def _ordered(bits: tf.Tensor) -> tf.Tensor:
    """Converts the bits of floats to integers of the same order, and back."""
    negative = tf.bitwise.right_shift(bits, 31)
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.bitwise_and(negative, _SIGN_OFF))


def grid(low: tf.Tensor, high: tf.Tensor, bits: int, stochastic: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Step and base, float32 [rows, 1] each, of blocks with these minima and maxima."""
    levels = 2**bits - 1
    intervals = float(levels - 1 if stochastic and bits > 1 else levels)
    largest = tf.maximum(high, -low)
    # Divide before subtracting: high - low overflows for huge values.
    step = tf.maximum(high / intervals - low / intervals, largest * _RESOLUTION)
    unusable = ((step >= _HUGE) | (largest + step > tf.float32.max)) & (largest <= tf.float32.max)
    step = tf.where(unusable, tf.zeros_like(step), step)
    # The value of a constant block is four steps, plus or minus: exact, and the step stays below _HUGE.
    step = tf.where(high > low, step, largest * 0.25)
    step = tf.where(step > _TINY, step, tf.zeros_like(step))
    start = tf.math.divide_no_nan(low, step)
    if stochastic:
        return step, tf.floor(start) if bits > 1 else start
    return step, tf.round(start)


def quantize(
    values: tf.Tensor, step: tf.Tensor, base: tf.Tensor, bits: int, noise: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Codes (uint8 [rows, block]) of `values` on the grid, and the values (float32) that they decode to.

    `noise` in [0, 1) gives stochastic rounding, None nearest rounding.
    """
    largest = float(2**bits - 1)
    position = values * tf.where(step > 0.0, 1.0 / step, tf.zeros_like(step))
    if noise is None:
        # Round before subtracting the base, an integer of at most 2**22: both operations are exact.
        lowest = base + _MAGIC
        shifted = tf.clip_by_value(position + _MAGIC, lowest, lowest + largest)
        decoded = (shifted - _MAGIC) * step
    else:
        # Noise stays below 1: 255 + u would round up to 256 in float32, and a zero would become a step.
        code = tf.clip_by_value(tf.floor((position - base) + noise * (1.0 - 2.0**-16)), 0.0, largest)
        decoded = (code + base) * step
        # Not a constant, with which the compiler would store the lowest byte of the float `shifted`: ptxas 12.9 turns
        # that into a conversion of the float's value, and all codes are 255 on a GPU.
        lowest = tf.minimum(base, 0.0) + _MAGIC
        shifted = code + lowest
    codes = tf.bitcast(shifted, tf.int32) - tf.bitcast(lowest, tf.int32)
    return tf.cast(codes, tf.uint8), decoded


def dequantize(codes: tf.Tensor, step: tf.Tensor, base: tf.Tensor) -> tf.Tensor:
    """The float32 values that `codes`, of any integer dtype, decode to."""
    return (tf.cast(codes, tf.float32) + base) * step
