"""How many local steps a round has with `auto:local_steps=(1|8|32)`.

With a round of n steps, a step takes `rest + exchange / n` seconds on average, and makes the progress of
`usual_progress.of_round`. The n with the most progress per second is chosen, from times that are measured at each
exchange. It begins with the shortest round, which says soonest how long an exchange takes.

1. Each rank measures how long its steps take, and at an exchange how long that takes.
2. With the next exchange, these numbers are reduced over the ranks, and rank 0 proposes a length.
3. With the one after it, rank 0's proposal is sent, and all ranks follow it: ranks that round differently may have
   another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.experimental import numpy as tnp

from ..common import tracing
from ..common.verbosity import say
from ..engine import clock
from . import policy
from .step_times import UNTIMED
from .usual_progress import of_round

# What a rank sends that has measured nothing.
_NOTHING = (0.0, 0.0, 1.0, 0.0)
# A switch must make a step cheaper by this factor.
_BETTER = 0.95


class RoundLength:
    """The length of rounds, the same on all ranks.

    Args:
        lengths: The numbers of local steps to choose from, from the smallest on.
        name: Returns the prefix of the names of operations; an elastic job may change it.
        process_set: The ranks.

    Attributes:
        now: The length of this round, an int64 variable.
        times: Seconds of a step without the exchange on the slowest rank, and of an exchange on the rank that waits
            least in it, float32 [2]: averages over the last exchanges; 0 until they are known.
    """

    def __init__(self, lengths: Sequence[int], name: Callable[[], str], process_set: Any) -> None:
        self.lengths, self._name, self._process_set = list(lengths), name, process_set
        self._progress = [of_round(length) for length in self.lengths]
        with tf.device("CPU"), tf.init_scope():
            self.now = tracing.variable(tf.constant(self.lengths[0], tf.int64), "round_length")
            self.times = tracing.variable(tf.zeros([2]), "round_times")
            # This rank's: seconds of a step, minus those of an exchange, 1 if one is not known, 1 + the proposed place.
            self._numbers = tracing.variable(tf.constant(_NOTHING), "round_numbers")
            # This rank's average seconds of a step without an exchange; 0 until it is known.
            self._rest = tracing.variable(tf.constant(0.0), "round_rest")
            # When the last step ended, with its exchange; 0 if what came since was not training alone.
            self._ended = tracing.variable(tf.constant(0.0, tf.float64), "round_ended")
            # Exchanges whose times are still ignored.
            self._untimed = tracing.variable(tf.constant(UNTIMED), "round_untimed")

    def present(self) -> int:
        """The length of this round. Not for use in a graph."""
        return int(self.now)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """What all ranks have alike, by the names that checkpoints use."""
        return {"round_length": self.now, "round_times": self.times}

    def pause(self) -> None:
        """What comes until the end of the next step is not training alone. Not for use in a graph."""
        with tf.init_scope():
            self._ended.assign(0.0)

    def restored(self) -> None:
        """After a checkpoint set the `variables`: what was measured before does not count. Not for use in a graph."""
        with tf.init_scope():
            self._numbers.assign(_NOTHING)
        self.pause()

    def end_step(self, updated: tf.Tensor, is_step: tf.Tensor) -> None:
        """Measures a step, before its exchange.

        What is longer than usual, because something was evaluated before it, counts as twice as long.

        Args:
            updated: A value that the step has updated last.
            is_step: Whether the step is over, a bool scalar; a pass in which gradients are only summed is not.
        """
        now = clock.stamp([updated])
        with tf.device("CPU"):
            last, old = self._ended.read_value(), self._rest.read_value()
            seconds = tf.cast(now - last, tf.float32)
            self._rest.assign(
                policy.average(tnp, old, seconds, is_step & (last > 0.0) & (self._untimed.read_value() <= 0))
            )
            self._ended.assign(tf.where(is_step, now, last))

    def exchange(
        self, movements: Sequence[tf.Tensor], reduce: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """The mean movements, as `reduce` returns them; follows the times, and chooses a length.

        All ranks call it together, in a graph or outside.
        """
        if not self._process_set.included() or self._process_set.size() == 1:
            return reduce(movements)
        began = clock.stamp(movements)
        with tf.control_dependencies([began]):  # TensorFlow may take a timestamp late
            received = reduce([tf.identity(movement) for movement in movements])
        self._follow(began, clock.stamp(received, began))
        return received

    def _follow(self, began: tf.Tensor, ended: tf.Tensor) -> None:
        """Takes the numbers of the exchange before into account, and keeps those of this one for the next."""
        with tf.device("CPU"):
            # Without TensorFlow's name scopes: they may differ between ranks, see `engine.step`.
            agreed = hvd.allreduce(
                self._numbers.read_value(), op=hvd.Max, name=f"{self._name()}_round_length", ignore_name_scope=True,
                process_set=self._process_set,
            )  # fmt: skip
            measured = tf.stack([agreed[0], -agreed[1]])
            times = policy.average(tnp, self.times.read_value(), measured, agreed[2] < 0.5)
            self.times.assign(times)
            lengths, voted = tf.constant(self.lengths, tf.int64), tf.cast(tf.round(agreed[3]), tf.int32) - 1
            before = self.now.read_value()
            # The length of a checkpoint may be another one than those to choose from: the nearest one counts.
            place = tf.argmin(tf.abs(lengths - before), output_type=tf.int32)
            place = tf.where(voted >= 0, tf.clip_by_value(voted, 0, len(self.lengths) - 1), place)
            chosen = tf.gather(lengths, place)
            self.now.assign(chosen)
            is_first = self._process_set.rank() == 0
            # All ranks trace it: their graphs should be equal.
            tf.cond((chosen != before) & is_first, lambda: self._say(before, chosen, times), lambda: None)
            proposed = propose(times, place, self.lengths, self._progress)
            rest, untimed = self._rest.read_value(), self._untimed.read_value()
            exchange, unknown = tf.cast(ended - began, tf.float32), (untimed > 0) | (rest <= 0.0)
            vote = tf.cast(proposed + 1, tf.float32) * float(is_first)
            self._numbers.assign(tf.stack([rest, -exchange, tf.cast(unknown, tf.float32), vote]))
            self._ended.assign(ended)
            self._untimed.assign(tf.maximum(untimed - 1, 0))

    def _say(self, before: tf.Tensor, now: tf.Tensor, times: tf.Tensor) -> None:
        def show(before: np.ndarray, now: np.ndarray, times: np.ndarray) -> None:
            rest, exchange = (1e3 * times).tolist()
            say(
                f"auto: local_steps {int(before)} -> {int(now)}; a step takes {rest:.3g} ms, and an exchange "
                f"{exchange:.3g} ms"
            )

        tf.numpy_function(show, [before, now, times], [])


def propose(times: tf.Tensor, place: tf.Tensor, lengths: Sequence[int], progress: Sequence[float]) -> tf.Tensor:
    """The position of the best length, an int32 scalar.

    Args:
        times: Seconds of a step without the exchange, and of an exchange, float32 [2]; 0 if they are not known yet.
        place: The position of the present one, which is kept if no other is clearly better.
        lengths: Steps of a round.
        progress: Of a step in such a round, relative to a step with an exchange.
    """
    costs = (times[0] + times[1] / tf.constant(lengths, tf.float32)) / tf.constant(progress, tf.float32)
    best = tf.argmin(costs, output_type=tf.int32)
    is_better = tf.gather(costs, best) < _BETTER * tf.gather(costs, place)
    return tf.where(is_better & tf.reduce_all(times > 0.0), best, place)
