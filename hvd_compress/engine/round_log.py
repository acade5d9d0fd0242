"""What the exchanges of local steps have moved: a row for each exchange, in a ring buffer on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
import tensorflow as tf

from ..common import tracing
from .norms import norm_of

# The number of training steps when the exchange ended, and 2-norms over all weights that were exchanged:
# - movement: of this rank's movement, synchronized weights minus own weights;
# - drift: of this rank's movement minus the mean movement that it received, which may have lost some by compression.
#   Without loss, its root mean square over the ranks is the spread of the movements;
# - outer_step: of the change of the synchronized weights;
# - weights: of the synchronized weights before;
# - statistics_drift: like drift, of the moving statistics, as a share of their norm; NaN if there are none.
COLUMNS = ("step", "movement", "drift", "outer_step", "weights", "statistics_drift")
ROWS = 256


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The tensors of one exchange, or of one of its fragments. All lists but those of statistics belong together."""

    own: Sequence[tf.Tensor]  # this rank's movements
    mean: Sequence[tf.Tensor]  # movements, as received
    before: Sequence[tf.Tensor]  # synchronized weights
    after: Sequence[tf.Tensor]
    own_statistics: Sequence[tf.Tensor]  # movements of moving statistics
    mean_statistics: Sequence[tf.Tensor]
    statistics: Sequence[tf.Tensor]  # synchronized ones before

    def squares(self) -> tf.Tensor:
        """Sums of squares over all elements, which add up over fragments: float64 [6]."""
        norms = [
            norm_of(self.own),
            norm_of(_differences(self.own, self.mean)),
            norm_of(_differences(self.after, self.before)),
            norm_of(self.before),
            norm_of(_differences(self.own_statistics, self.mean_statistics)),
            norm_of(self.statistics),
        ]
        return tf.cast(norms, tf.float64) ** 2


def _differences(left: Sequence[tf.Tensor], right: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [a - b for a, b in zip(left, right)]


class RoundLog:
    """Keeps the last 256 exchanges of local steps.

    Args:
        name: The prefix of the names of its variables.
    """

    def __init__(self, name: str) -> None:
        self._num_read: dict[Hashable, int] = {}  # by reader
        with tf.init_scope(), tf.device("CPU"):
            self._rows = tracing.variable(tf.zeros([ROWS, len(COLUMNS)], tf.float64), f"{name}_rounds")
            self._count = tracing.variable(tf.constant(0, tf.int64), f"{name}_num_rounds")

    def record(self, step: tf.Tensor, squares: tf.Tensor) -> None:
        """Adds an exchange, in a graph or outside.

        Args:
            step: The number of steps so far, a scalar.
            squares: The sum of `Exchange.squares` over the fragments that were exchanged.
        """
        with tf.device("CPU"):
            *norms, statistics_drift, statistics = tf.unstack(tf.sqrt(squares))
            row = tf.stack([tf.cast(step, tf.float64), *norms, statistics_drift / statistics])
            index = tf.cast(self._count.read_value() % ROWS, tf.int32)
            written = self._rows.scatter_nd_update([[index]], row[None])
            with tf.control_dependencies([written]):
                self._count.assign_add(1)

    # On the host

    @property
    def count(self) -> int:
        """The number of exchanges so far."""
        return int(self._count)

    def skip(self, reader: Hashable) -> None:
        """Exchanges so far are not read."""
        self._num_read[reader] = self.count

    def read(self, reader: Hashable) -> np.ndarray:
        """The exchanges since the reader's last call, at most 256: float64 [exchanges, COLUMNS]."""
        count = self.count
        new = np.arange(max(self._num_read.get(reader, 0), count - ROWS), count)
        self._num_read[reader] = count
        return self._at(new)

    def last(self) -> dict[str, float]:
        """The last exchange by the names of columns; empty before the first one."""
        count = self.count
        return dict(zip(COLUMNS, self._at(np.array([count - 1]))[0].tolist())) if count else {}

    def _at(self, exchanges: np.ndarray) -> np.ndarray:
        if not len(exchanges):
            return np.empty([0, len(COLUMNS)])
        with tf.device("CPU"):
            rows: np.ndarray = self._rows.sparse_read(exchanges % ROWS).numpy()
        return rows
