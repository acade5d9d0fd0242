"""What the exchanges of local steps have moved: a row for each exchange."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from .norms import norm_of
from .ring_buffer import RingBuffer

# The number of training steps when the exchange ended, and 2-norms over all weights that were exchanged:
# - movement: of this rank's movement, synchronized weights minus own weights;
# - drift: of this rank's movement minus the mean movement that it received, which may have lost some by compression.
#   Without loss, its root mean square over the ranks is the spread of the movements;
# - outer_step: of the change of the synchronized weights;
# - weights: of the synchronized weights before;
# - statistics_drift: like drift, of the moving statistics, as a share of their norm; NaN if there are none.
COLUMNS = ("step", "movement", "drift", "outer_step", "weights", "statistics_drift")
ROWS = 256


class RoundLog(RingBuffer):
    """Keeps the last 256 exchanges of local steps.

    Args:
        name: The prefix of the names of its variables.
    """

    def __init__(self, name: str) -> None:
        super().__init__(ROWS, len(COLUMNS), f"{name}_rounds")

    def record(self, step: tf.Tensor, squares: tf.Tensor) -> None:
        """Adds an exchange, in a graph or outside.

        Args:
            step: The number of steps so far, a scalar.
            squares: The sum of `squares` over the fragments that were exchanged.
        """
        with tf.device("CPU"):
            *norms, statistics_drift, statistics = tf.unstack(tf.sqrt(squares))
            self.write(tf.stack([tf.cast(step, tf.float64), *norms, statistics_drift / statistics]))

    def last(self) -> dict[str, float]:
        """The last exchange by the names of columns; empty before the first one."""
        return {name: float(value) for row in self.newest() for name, value in zip(COLUMNS, row)}


def squares(
    own: Sequence[tf.Tensor],
    mean: Sequence[tf.Tensor],
    before: Sequence[tf.Tensor],
    after: Sequence[tf.Tensor],
    trained: int,
) -> tf.Tensor:
    """Sums of squares over all elements of an exchange, which add up over fragments.

    Args:
        own: This rank's movements.
        mean: Movements, as received.
        before: Synchronized values.
        after: These after the exchange.
        trained: The number of weights that are trained, which come first; the others are moving statistics.

    Returns:
        float64 [6]: movement, drift, outer step and weights (see `COLUMNS`), then of the statistics' drift and values.
    """
    drift = _differences(own, mean)
    norms = [
        norm_of(own[:trained]),
        norm_of(drift[:trained]),
        norm_of(_differences(after[:trained], before[:trained])),
        norm_of(before[:trained]),
        norm_of(drift[trained:]),
        norm_of(before[trained:]),
    ]
    return tf.cast(norms, tf.float64) ** 2


def _differences(left: Sequence[tf.Tensor], right: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [a - b for a, b in zip(left, right)]
