"""Whether a step waits for its exchange, with `auto:delay=(0|1)`.

Training begins without a delay. Each step measures how long it takes, and of that the coding, the wire, and the
computation of gradients, which may run beside the wire. With the next step's uncompressed gradients, these numbers are
averaged over the ranks. Rank 0 decides, and sends its decision with the step after that. Once the delay has begun, it
stays.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.experimental import numpy as tnp

from ..common import tracing
from ..common.verbosity import say
from ..engine import clock
from ..engine.observer import StepMeasurement
from ..engine.selector import DelaySelector
from ..engine.settings import Settings
from . import policy
from .step_times import StepTimer
from .usual_progress import OF_DELAY

_NAME = "hvdc_delay"  # of variables
# Steps that are measured before a decision.
_MEASURED = 8
# The delay must make a step cheaper by this factor.
_BETTER = 0.95


class DelayChoice(DelaySelector):
    """Decides when the delay begins.

    Args:
        settings: Those of the plan, with `delay=1`.
    """

    def __init__(self, settings: Settings) -> None:
        self._ranks, self._is_first = settings.process_set.size(), settings.process_set.rank() == 0
        self._averages = settings.averages
        self._timer = StepTimer()
        with tf.device("CPU"):
            self._begun = tracing.variable(tf.constant(False), _NAME)
            # Averages over the ranks: seconds of a step, of its coding, of the wire, and of all else.
            self._times = tracing.variable(tf.zeros([4]), _NAME)
            self._measured = tracing.variable(tf.constant(0), _NAME)  # the number of steps in `_times`
            # This rank's times of the step before, and whether it proposes to begin.
            self._numbers = tracing.variable(tf.zeros([5]), _NAME)

    def has_begun(self) -> tf.Tensor:
        """Whether this step has a delay; a bool scalar."""
        with tf.device("CPU"):
            return self._begun.read_value()

    def numbers(self) -> tf.Tensor:
        """This rank's measurements of the step before, float32 [5]."""
        with tf.device("CPU"):
            return self._numbers.read_value()

    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables, by the names that checkpoints use."""
        return {"delay_begun": self._begun, "delay_times": self._times, "delay_measured": self._measured}

    def restored(self) -> None:
        """What was measured before a checkpoint was loaded, and proposed, does not count."""
        with tf.init_scope():
            self._numbers.assign(tf.zeros_like(self._numbers))
        self._timer.restart()  # the next step may be traced, and connects the ranks

    def wants_times(self, bucket: int) -> bool:
        """All buckets."""
        return True

    def observe(self, measurement: StepMeasurement) -> None:
        """Takes the numbers of the step before into account, and keeps those of this step for the next one."""
        assert measurement.agreed is not None
        with tf.device("CPU"):
            agreed = measurement.agreed if self._averages else measurement.agreed / self._ranks
            is_timed = tf.reduce_all(agreed[:4] > 0.0)
            times = policy.average(tnp, self._times.read_value(), agreed[:4], is_timed)
            measured = self._measured.read_value() + tf.cast(is_timed, tf.int32)
            before, begun = self._begun.read_value(), agreed[4] * self._ranks > 0.5
            self._times.assign(times)
            self._measured.assign(measured)
            self._begun.assign(before | begun)
            tf.cond(begun & ~before & self._is_first, lambda: self._say(times), lambda: None)
            proposed = (measured >= _MEASURED) & pays(times) & self._is_first
            buckets = [bucket.timestamps for bucket in measurement.buckets if bucket is not None]
            of_step = tf.ensure_shape(tf.numpy_function(self._of_step, [clock.stacked(buckets)], tf.float32), [4])
            own = tf.where(before, tf.zeros([4]), of_step)
            self._numbers.assign(tf.concat([own, [tf.cast(proposed, tf.float32)]], 0))

    def _of_step(self, timestamps: np.ndarray) -> np.ndarray:
        """Seconds of a step, of its coding, of the wire, and of all else: zeros if they are not known."""
        waits, coding, wire, span, rest = self._timer.measure(timestamps)
        times = np.array([rest + span, coding.sum(), wire.sum(), rest + waits.sum()], np.float32)
        return times if rest > 0.0 else np.zeros_like(times)

    def _say(self, times: tf.Tensor) -> None:
        def show(times: np.ndarray) -> None:
            step, coding, wire, computing = (1e3 * times).tolist()
            say(
                f"auto: delay=1 begins; a step takes {step:.3g} ms: computing {computing:.3g} ms, coding {coding:.3g} "
                f"ms, the wire {wire:.3g} ms"
            )

        tf.numpy_function(show, [times], [])


def pays(times: tf.Tensor) -> tf.Tensor:
    """Whether training makes more progress per second with a delay; a bool scalar.

    Args:
        times: Seconds of a step, of its coding, of the wire, and of its computing, float32 [4].
    """
    step, coding, wire, computing = tf.unstack(times)
    # A processor that encodes and decodes does not train meanwhile; what is on its way keeps it from nothing.
    return (coding + tf.maximum(computing, wire)) / OF_DELAY < _BETTER * step
