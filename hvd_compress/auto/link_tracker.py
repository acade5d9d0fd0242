"""Follows the latency and the bandwidth of the link from step to step. Pure functions; float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import quotient

# The weight of a step's measurements decays by this factor in each step.
_DECAY = 0.45
# The weight of the factors so far, in observations. Latency changes less often than bandwidth.
_STIFFNESS = np.array([1.0, 0.05], np.float32)
# The factors change by at most _MAX_CHANGE in a step, and stay below _MAX_FACTOR. Both hold for the inverse, too.
_MAX_CHANGE = 4.0
_MAX_FACTOR = 1e4
# A step counts as at most so many times as long as expected: errors are relative, and a longer one would say less.
_MAX_DELAY = 8.0
# The link is another one after two steps in a row that took more than so many times as long as expected.
_NEW_LINK = 3.0
# Then the bandwidth has changed, rather than the latency.
_STIFFNESS_OF_NEW = np.array([1.0, 0.001], np.float32)

NUMBERS = 6  # of what is kept from step to step


def fit(
    xp: Any, moments: Any, factors: Any, messages: Any, transfer: Any, seconds: Any, coding: Any
) -> tuple[Any, Any]:
    """Updates the factors by which latency and time per byte differ from the calibrated ones.

    The factors minimize the sum of squares of

        (latency_factor * messages + byte_factor * transfer - seconds) / (seconds + coding)

    over all steps so far. The weight of a step is 0.45 of that of the next one. The errors are relative for two
    reasons. A step that was held up has little weight, and steps cannot be faster than the link. A step that was mostly
    encoding and decoding has little weight, too: it says little about the link. If two steps in a row take more than
    three times as long as expected, the bandwidth has changed, and what was known about it hardly counts.

    Args:
        xp: The array module, see `arrays`.
        moments: [6], sums over past steps, and how many times as long as expected the last one took; zeros at first.
        factors: [2], of latency and of time per byte, so far; ones at first.
        messages: Scalar, the predicted seconds of latency in this step.
        transfer: Scalar, the predicted seconds for the bytes of this step, without those that a burst has hidden.
        seconds: Scalar, the measured seconds on the wire.
        coding: Scalar, the seconds of encoding and decoding. `seconds` and `coding` are 0 if nothing was measured.

    Returns:
        The new moments and factors.
    """
    expected = messages * factors[0] + transfer * factors[1]
    delay = quotient(xp, seconds, expected)
    has_changed = xp.minimum(delay, moments[5]) > _NEW_LINK
    seconds = xp.minimum(seconds, _MAX_DELAY * expected)
    total = seconds + coding
    x, y, z = (quotient(xp, part, total) for part in (messages, transfer, seconds))
    sums = xp.where(has_changed, 0.0, _DECAY * moments[:5]) + xp.stack([x * x, x * y, y * y, x * z, y * z])
    stiffness = xp.where(has_changed, _STIFFNESS_OF_NEW, _STIFFNESS)
    of_latency, of_bytes = stiffness[0], stiffness[1]
    xx, xy, yy, sx, sy = (sums[i] for i in range(5))
    a, b = factors[0], factors[1]
    # The unknowns are the changes relative to the factors so far: the stiffness holds them near 1.
    m00, m01, m11 = xx * a * a + of_latency, xy * a * b, yy * b * b + of_bytes
    r0, r1 = sx * a + of_latency, sy * b + of_bytes
    change = xp.stack([r0 * m11 - r1 * m01, r1 * m00 - r0 * m01]) / (m00 * m11 - m01 * m01)
    change = xp.clip(change, 1.0 / _MAX_CHANGE, _MAX_CHANGE)
    return xp.concatenate([sums, delay[None]]), xp.clip(factors * change, 1.0 / _MAX_FACTOR, _MAX_FACTOR)
