"""Which candidates the steps of `auto` are traced with, and when others are added.

The first steps are traced with the first choice only, as if it were a fixed compressor. Other candidates, and the
compression of the rows of embeddings, are traced once they are predicted to save more time than the new trace takes.
If the progress of the first choice is hardly in doubt, it is not measured either until the new trace takes a small
share of the time so far.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..common import tracing
from ..common.phases import Phase
from ..compressors import Auto
from . import policy, progress, report, trace_worth, usual_progress
from .comparisons import Comparisons
from .predictions import Predictions
from .step_numbers import StepNumbers

_NAME = "hvdc_auto"  # of the variable


class Traces:
    """Which candidates the steps are traced with.

    Args:
        auto: The compressor `auto`.
        predictions: What the candidates are expected to cost and to gain.
        numbers: Unpacks what the ranks measured.
        state: The variables that the choice is based on. `watch` updates them as long as steps are traced with one
            candidate.
        compresses_rows: Whether the first step compresses the rows of embeddings; the same on all ranks.
        step: The number of steps so far, a variable.
        decides: Whether this is rank 0, which decides what is traced.

    Attributes:
        candidates: Positions of the candidates that steps are traced with from now on.
        compresses_rows: Whether these steps compress the rows of embeddings.
        rows: `compresses_rows` as a variable, for checkpoints.
    """

    def __init__(
        self,
        auto: Auto,
        predictions: Predictions,
        numbers: StepNumbers,
        state: policy.State,
        compresses_rows: bool,
        step: tf.Variable,
        decides: bool,
    ) -> None:
        self._auto, self._predictions, self._format, self._state = auto, predictions, numbers, state
        self._step, self._decides = step, decides
        count, first = len(auto.candidates), state.choice.numpy().tolist()
        self.candidates = list(range(count)) if traces_all(auto) else sorted(set(first))
        self.compresses_rows, self._is_held = compresses_rows, False
        with tf.device("CPU"):
            self.rows = tracing.variable(tf.constant(compresses_rows), _NAME)
        self._simulated = state.progress.numpy()  # `State.progress`, while `watch` follows the measurements
        # Which candidates are not measured while they are traced alone: never, or not before `_may_measure` is True.
        never = (predictions.prior.lost < usual_progress.LOSES_LITTLE) | (count == 1)
        is_sure = predictions.usual >= usual_progress.SURE_USUALLY
        is_sure &= predictions.prior.progress >= usual_progress.SURE_AT_LEAST
        self._never_measured, self._is_sure = never.tolist(), (is_sure & ~never).tolist()
        self._may_measure = False
        self._comparisons = Comparisons()
        self._follows = len(self.candidates) == 1  # whether `watch` follows the measurements, or the graph does
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()  # which trace steps
        self._made = time.time()
        self._trace_seconds = 0.0  # from `_made` to the first exchange

    # While steps are traced

    def add_running_functions(self) -> None:
        """Remembers the functions that run now: they trace steps, and do it again when candidates are added."""
        self._functions.update(tracing.running_functions())

    @property
    def measured(self) -> list[int]:
        """The traced candidates whose progress is measured in steps that are traced from now on."""
        is_mild = len(self.candidates) == 1 and self._never_measured[self.candidates[0]]
        return [] if self._is_held or is_mild or self._measures_later else self.candidates

    @property
    def _measures_later(self) -> bool:
        """Whether the progress of the only traced candidate is measured after another trace."""
        return len(self.candidates) == 1 and self._is_sure[self.candidates[0]] and not self._may_measure

    # After each step

    def mask(self, more: Iterable[int] = ()) -> np.ndarray:
        """What is traced, and `more`; float32 [C + 2].

        1 for each traced candidate, then 1 for compressed rows, and 1 unless progress is to be measured later.
        """
        rows, measuring = self._predictions.rows_at, self._predictions.measuring_at
        mask = np.zeros(measuring + 1, np.float32)
        mask[[*self.candidates, *more]] = 1.0
        mask[rows] = mask[rows] or self.compresses_rows
        mask[measuring] = mask[measuring] or not self._measures_later
        return mask

    def set_first_exchange(self, timestamp: float) -> None:
        """Called in each step with the time at which its exchange begins; only the first call counts."""
        self._trace_seconds = self._trace_seconds or timestamp - self._made

    def watch(
        self,
        running: Sequence[int],
        step: int,
        numbers: np.ndarray,
        counts: np.ndarray,
        restart_timer: Callable[[], None],
    ) -> np.ndarray:
        """Decides whether more should be traced. Returns what this rank wants to be traced, see `mask`.

        Args:
            running: The candidates that the running function has traced. Until it is called again, they may be fewer
                than `candidates`, or others.
            step: The number of steps before.
            numbers: The mean of what the ranks sent, float32 [S], see `StepNumbers`.
            counts: `State.embedding_counts`.
            restart_timer: Called if the next step is traced again, so that its times are not counted.
        """
        # In each step, on a core that training needs: TensorFlow is called only for the variables, in a comparison.
        mask, is_old = self.mask(), not set(running) <= set(self.candidates)  # of before a hold, or of a warm-up
        self._follows = len(running) == 1 and not is_old
        may_grow = not self._is_held and not mask.all()
        if is_old or not (self._follows or may_grow):
            return mask
        if self._follows and (simulated := self._format.progress(numbers))[progress.Row.ENERGY].any():
            self._simulated = progress.add(np, self._simulated, simulated)
        span, wanted = self._format.span_and_wanted(numbers)
        missing = [i for i, traced in enumerate(mask.tolist()) if wanted[i] > 0.0 and not traced]
        if not self._comparisons.add(numbers, span) and not missing:
            return mask
        with tf.init_scope(), tf.device("CPU"):
            state = self.update_state()
            if missing:
                restart_timer()
                self._trace(missing)
                if self._decides:
                    names = [candidate.spec for candidate in self._auto.candidates]
                    names += ["compressed rows of embeddings", "a measurement of its progress"]  # of the only candidate
                    report.log_trace([names[i] for i in missing])
                    self._say_if_slow(step)
            more = self._worth_tracing(state, step, counts) if self._decides and may_grow else frozenset()
        return self.mask(more)

    # At other times

    def state_now(self) -> policy.State:
        """The state with the newest measurements."""
        return self._followed(self._comparisons.seen())

    def update_state(self) -> policy.State:
        """Assigns the newest measurements to the variables, which otherwise waits for the next comparison.

        Returns the state, NumPy arrays.
        """
        with tf.init_scope(), tf.device("CPU"):
            numbers = self._comparisons.take()
            state = self._followed(numbers)
            if self._follows and numbers:  # without any, nothing is new, and a checkpoint may have set the variables
                for variable, new in zip(self._state, state):
                    variable.assign(new)
            return state

    def hold(self, candidates: Sequence[int], is_held: bool) -> None:
        """Steps that are traced from now on have only these candidates; while it is held, no others are compared."""
        self.update_state()
        self.candidates, self._is_held = list(candidates), is_held
        self._follows = len(self.candidates) == 1
        self._comparisons.restart()
        self._simulated = self._state.progress.numpy()

    def retrace(self, candidates: Sequence[int]) -> None:
        """Lets the next step be traced again, with these candidates."""
        self.hold(candidates, False)
        self._may_measure = True  # as this trace is made anyway
        if self._functions:  # otherwise the first trace is not yet made, or is just being made
            tracing.forget_traces(tracing.running_functions() | set(self._functions))

    def restore(self, used: Iterable[int]) -> None:
        """Called after a checkpoint set `rows` and the state, in which the candidates `used` are in use."""
        # Rows that were not compressed have no residuals.
        compressed_rows = {self._predictions.rows_at} if self.rows.numpy() else set()
        self.rows.assign(self.compresses_rows)
        self._comparisons.take()
        self._simulated = self._state.progress.numpy()
        if not self._functions and self._simulated[progress.Row.ENERGY].any():
            self._may_measure = True  # goes on, in the first trace of this process
        self._trace([*used, *compressed_rows])

    def _trace(self, more: Iterable[int]) -> None:
        """Lets the next step be traced again, with more positions in `mask`."""
        before, mask = self.mask(), self.mask(more)
        if (mask != before).any():
            *candidates, rows, measures = mask.tolist()
            self._may_measure = self._may_measure or (self._measures_later and bool(measures))
            self.candidates, self.compresses_rows = np.flatnonzero(candidates).tolist(), bool(rows)
            self._comparisons.restart()
            self.rows.assign(self.compresses_rows)
            # What runs now may have another trace than the one that `_functions` had last.
            tracing.forget_traces(tracing.running_functions() | set(self._functions))

    def _say_if_slow(self, step: int) -> None:
        """Says that the next step is being traced again, if that takes long."""
        counter, functions = self._step, self._functions

        def is_over() -> bool:
            return int(counter) > step + 1 or tracing.running_functions().isdisjoint(functions)

        usual = f"the first trace took {self._trace_seconds:.0f} s"
        Phase("tracing the step again", usual, is_over=is_over).begin()

    def _worth_tracing(self, state: policy.State, step: int, counts: np.ndarray) -> frozenset[int]:
        """Positions in `mask` that are worth a new trace after `step` steps."""
        seconds = time.time() - self._made
        traced = trace_worth.Traced(
            self.candidates, self.compresses_rows, self._measures_later, step, seconds, self._trace_seconds
        )
        return trace_worth.additions(self._predictions, state, traced, counts)

    def _followed(self, numbers: Sequence[np.ndarray]) -> policy.State:
        """The state after some steps with their numbers, which the graph has not taken into account: NumPy arrays."""
        state = policy.State(*(variable.numpy() for variable in self._state))
        for one in numbers if self._follows else ():
            _, _, measured = self._format.unpack(np, one)
            state = state._replace(steady=np.True_)
            state = policy.follow(np, state, measured, self._predictions.costs, self._predictions.burst)
        # `numbers` are those of the last steps only.
        return state._replace(progress=self._simulated) if self._follows else state


def traces_all(auto: Auto) -> bool:
    """Whether all candidates are traced at once: limits are kept with measurements of all of them."""
    is_limited = auto.objective == "step" or auto.min_progress or auto.budget
    return bool(is_limited) or not tracing.can_forget_traces()
