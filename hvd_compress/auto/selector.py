"""`AutoSelector`: the variables of `auto`, and what it does in each step.

1. In step t, each rank measures how long its exchanges take. In some steps, it also measures how much progress each
   candidate makes.
2. In step t + 1, these numbers are reduced over the ranks, along with the uncompressed gradients. Then all ranks know
   the same numbers. They follow the link and compute the best choice.
3. In step t + 2, rank 0's choice is sent. The others follow it: ranks that round differently may have another one.
4. From step t + 3 on, all ranks use this choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import numpy as tnp

from ..common import tracing
from ..common.names import checksum
from ..compressors import Auto, Compressor, Seeds
from ..engine import clock
from ..engine.compression_report import BucketReport
from ..engine.observer import StepMeasurement
from ..engine.plan import Plan
from ..engine.selector import ModelSelector, Result, switch_case
from . import policy, report
from .predictions import Predictions
from .progress import ROWS, Row
from .progress_sample import ProgressSample
from .step_numbers import StepNumbers
from .step_times import StepTimer, StepTimes
from .traces import Traces, traces_all

_NAME = "hvdc_auto"  # of variables


class AutoSelector(ModelSelector):
    """The selector for the buckets of `auto`; `start.selector` makes it.

    Args:
        plan: The plan.
        predictions: What the candidates are expected to cost and to gain.
        choice: The first choice: the position of each bucket's candidate, int32 [B].
        compresses_rows: Whether the rows of embeddings are compressed in the first step; the same on all ranks.

    Attributes:
        auto: The compressor `auto`.
        nbytes: Bytes of each bucket, as float32.
        state: What the choice is based on: a `policy.State` of tf.Variables on the host.
        traces: What steps are traced with.
    """

    def __init__(self, plan: Plan, predictions: Predictions, choice: tf.Tensor, compresses_rows: bool) -> None:
        # No reference to the plan: it refers to its selectors, and a circle would keep its memory until a garbage
        # collection.
        settings = plan.settings
        self._averages = settings.averages
        self._ranks, self._rank = settings.process_set.size(), settings.process_set.rank()
        self.auto: Auto = plan.layout.auto
        self._predictions, self.nbytes = predictions, predictions.nbytes
        self._place = {b: place for place, b in enumerate(plan.layout.auto_buckets)}
        self._counts = plan.state.embedding_counts
        candidates = self.auto.candidates
        self._uncompressed = [candidate.uncompressed for candidate in candidates]
        self._format = StepNumbers(self._ranks, self._rank, len(self.nbytes), len(candidates))
        self._timer = StepTimer()
        with tf.device("CPU"):
            self.state = policy.State(
                *(tracing.variable(value, _NAME) for value in policy.initial(choice, len(candidates)))
            )
            self._numbers = tracing.variable(tf.zeros([self._format.size]), _NAME)
            checksums = tf.constant([checksum(candidate.spec) for candidate in candidates], tf.int64)
            calibration = tf.stack([predictions.costs.messages, predictions.costs.transfer])
            self._specs, self._calibration = (tracing.variable(x, _NAME) for x in (checksums, calibration))
            # While a candidate is held: what was chosen before, or restored.
            self._not_held = {name: tracing.variable(choice, _NAME) for name in ("choice", "now")}
        self.traces = Traces(
            self.auto, predictions, self._format, self.state, compresses_rows, plan.state.step, self._rank == 0
        )
        self._before_hold: list[int] | None = None  # while a candidate is held, what was traced before
        self._first_choice, self._steps = choice, plan.state.step
        self._warms_up, self._of_warmup = False, self.auto.warmup_position or 0
        decays = [settings.residual_decay if settings.feeds_back(c) else 0.0 for c in candidates]
        shapes = {i: plan.layout.shapes[i] for i in plan.layout.model_wide.tensors.members}
        self._new_sample = functools.partial(
            ProgressSample, self.auto, shapes, decays, settings.adaptive, settings.normalized
        )
        self._sample: ProgressSample | None = None  # of the traced candidates, if their progress is measured
        self._follow_warmup(int(self._steps))
        self._renew_sample()

    @property
    def compresses_rows(self) -> bool:
        """Whether steps that are traced now compress the rows of embeddings that `auto` decides on."""
        return self.traces.compresses_rows

    # Selector

    def switch(self, bucket: int, exchange: Callable[[Compressor], Result]) -> Result:
        """The exchange with the bucket's candidate, which is not model-wide."""
        index = self._place_of(self.choice(bucket), self._per_bucket)
        return switch_case(index, [functools.partial(exchange, self.auto.candidates[c]) for c in self._per_bucket])

    def choice(self, bucket: int) -> tf.Tensor:
        """The position of the bucket's candidate in this step."""
        with tf.device("CPU"):
            return self.state.now.read_value()[self._place[bucket]]

    def current(self, bucket: int) -> Compressor:
        """The bucket's chosen candidate."""
        return self.auto.candidates[self.state.choice.numpy()[self._place[bucket]]]

    # ModelSelector

    def log_choice(self) -> None:
        """Prints the choice of the first step, on rank 0."""
        if self._rank == 0:
            with tf.init_scope():
                choice, seconds = self.state.choice.numpy(), sum(self._predictions.costs)
            report.log_start(self.auto, self.nbytes, seconds, choice, self._warms_up)

    def numbers(self) -> tf.Tensor:
        """This rank's measurements of the step before, float32 [S]."""
        with tf.device("CPU"):
            return self._numbers.read_value()

    def probe(self, seeds: Seeds, gradients: Sequence[Any]) -> tf.Tensor:
        """Simulates the candidates on a sample of the gradients; see `ProgressSample.measure`."""
        self.traces.add_running_functions()
        if self._sample is None:
            return tf.zeros([ROWS, len(self.auto.candidates)])
        # The mean over the ranks varies less than the numbers of one of them.
        factors = np.ones([ROWS, 1], np.float32)
        factors[Row.VARIANCE] = 1.0 / self._ranks
        return self._sample.measure(seeds, gradients) * factors

    def switch_model(
        self,
        per_bucket: Callable[[], Any],
        uncompressed: Callable[[], Any],
        model_wide: Callable[[int], Any],
    ) -> Any:
        """The exchange that holds for all buckets; see `ModelSelector.switch_model`."""
        traced_uncompressed = [self._uncompressed[c] for c in self.traces.candidates]
        if all(traced_uncompressed):
            return uncompressed()
        may_be_idle = any(traced_uncompressed)
        if not self._model_wide:
            return tf.cond(self._is_idle(), uncompressed, per_bucket) if may_be_idle else per_bucket()
        branches: list[Callable[[], Any]] = [functools.partial(model_wide, c) for c in self._model_wide]
        branches += [per_bucket] if self._per_bucket else []
        with tf.device("CPU"):
            index = self._place_of(self.state.now.read_value()[0], self._model_wide)
            if may_be_idle:
                index = tf.where(self._is_idle(), len(branches), index)
                branches.append(uncompressed)
        return switch_case(index, branches)

    def hold(self, candidate: int | None) -> None:
        """Uses only one candidate, or again those of before; see `ModelSelector.hold`."""
        with tf.init_scope():
            if candidate is not None:
                if self._before_hold is None:
                    self._before_hold = self.traces.candidates
                    for variable in self._not_held.values():
                        variable.assign(self.state.choice)
                traced, choice = [candidate], tf.fill([len(self.nbytes)], candidate)
            elif self._before_hold is not None:
                choice = self._not_held["choice"].read_value()
                traced, self._before_hold = sorted({*self._before_hold, *choice.numpy().tolist()}), None
            else:
                return
            self.traces.hold(traced, candidate is not None)
            self._use(choice, before=choice)  # no residuals are left
            self._follow_warmup(int(self._steps))

    def _use(self, choice: tf.Tensor, before: tf.Tensor) -> None:
        """Sets the choice for steps that are traced anew, and that of the step before. Nothing else is known of it."""
        self._sample = None  # it would go on with gradients of long ago
        self._renew_sample()
        for variable, value in zip((self.state.choice, self.state.now, self.state.before), (choice, choice, before)):
            variable.assign(value)
        for variable in (self.state.measured, self._numbers):
            variable.assign(tf.zeros_like(variable))
        self._timer.restart()  # a trace is not a part of a step

    def _follow_warmup(self, steps: int) -> None:
        """Begins or ends the warm-up, as it should be after so many steps; not while a candidate is held."""
        if self.auto.warms_up(steps) == self._warms_up or self._before_hold is not None:
            return
        with tf.init_scope(), tf.device("CPU"):
            self._warms_up = not self._warms_up
            of_warmup = tf.fill([len(self.nbytes)], self._of_warmup)
            choice = of_warmup if self._warms_up else self._first_choice
            traced = set(choice.numpy().tolist())
            is_plain = all(self._uncompressed[c] for c in traced)
            # If nothing is compressed from now on, the next step sends what the warm-up has left.
            self._retrace(traced | {self._of_warmup} if is_plain else traced)
            self._use(choice, before=of_warmup if is_plain else choice)

    def _retrace(self, candidates: set[int]) -> None:
        """Lets the next step be traced again: with these, or with all if they cannot be added later."""
        traces_everything = traces_all(self.auto) and not self._warms_up
        self.traces.retrace(range(len(self.auto.candidates)) if traces_everything else sorted(candidates))

    def restored(self, choice: bool) -> None:
        """Called on all ranks after a checkpoint set the residuals and the state; `choice`: also the choice."""
        with tf.init_scope(), tf.device("CPU"):  # also called while a step is traced
            self._numbers.assign(tf.zeros_like(self._numbers))  # those of the step before the checkpoint was loaded
            self._timer.restart()  # the next step may be traced, and connects the ranks
            if self._before_hold is not None:  # the candidate is still held; `hold` then goes back to what was restored
                self.traces.restore(())
                return
            state, warmed_up = self.state, self._warms_up
            if not choice and warmed_up:
                for variable in (state.choice, state.now, state.before):
                    variable.assign(self._first_choice)
            self._warms_up = self.auto.warms_up(int(self._steps))
            if self._warms_up:
                for variable in (state.choice, state.now):
                    variable.assign(tf.fill([len(self.nbytes)], self._of_warmup))
            used = {c for variable in (state.choice, state.now, state.before) for c in variable.numpy().tolist()}
            if not choice and all(self._uncompressed[c] for c in used) and not all(self._uncompressed):
                # As if the residuals came from the step before: the next one sends them.
                before = self._uncompressed.index(False)
                state.before.assign(tf.fill([len(self.nbytes)], before))
                used.add(before)
            if self._warms_up and not self._uncompressed[self._of_warmup]:
                used = {self._of_warmup}  # which sends what others left
            if self._warms_up or warmed_up:
                self._retrace(used)
            self.traces.restore(used)
            self._renew_sample()

    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables, by the names that checkpoints use.

        Two of them say what others refer to: positions to `auto_candidates`, factors of the link to `auto_calibration`.
        While a candidate is held, the choice is that of before.
        """
        self.traces.update_state()
        variables = self.state._asdict() | ({} if self._before_hold is None else self._not_held)
        variables |= {"rows": self.traces.rows, "candidates": self._specs, "calibration": self._calibration}
        return {f"auto_{name}": variable for name, variable in variables.items()}

    def report(self, step: int) -> list[BucketReport]:
        """The reports of the buckets after `step` steps."""
        predictions, state = self._predictions, self.traces.state_now()
        measured = np.flatnonzero(state.progress[Row.ENERGY] > 0.0).tolist()
        value = predictions.hoped(state, measured)
        known = report.Known(self.auto, self.nbytes, predictions.costs, predictions.others, value, state)
        return report.of_buckets(known, step)

    # Observer

    def wants_times(self, bucket: int) -> bool:
        """Whether the bucket is one of `auto`."""
        return bucket in self._place

    def observe(self, measurement: StepMeasurement) -> None:
        """Updates the state with the numbers of the step before, and keeps those of this step for the next one."""
        assert measurement.agreed is not None
        with tf.device("CPU"):
            numbers = measurement.agreed if self._averages else measurement.agreed / self._ranks
            choice, tried = self.state.choice.read_value(), tf.constant(-1)
            if len(self.traces.candidates) > 1:
                choice, tried = self._propose(measurement, numbers)
            counts = tf.zeros([0, 3], tf.int64) if self._counts is None else self._counts.read_value()
            buckets = [bucket.timestamps for b in self._place if (bucket := measurement.buckets[b]) is not None]
            own = tf.numpy_function(
                functools.partial(self._end_step, tuple(self.traces.candidates)),
                [measurement.step, measurement.committed, clock.stacked(buckets), choice, tried, measurement.probe,
                 numbers, counts],
                tf.float32,
            )  # fmt: skip
            self._numbers.assign(tf.ensure_shape(own, self._numbers.shape))

    def _propose(self, measurement: StepMeasurement, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Updates the state. Returns the proposed choice, int32 [B], and the candidate to try."""
        rules, costs = self._predictions.rules, policy.Costs(*map(tf.constant, self._predictions.costs))
        prior = policy.Value(*map(tf.constant, self._predictions.prior))
        state = policy.State(*(variable.read_value() for variable in self.state))
        agreed, trial, measured = self._format.unpack(tnp, tf.ensure_shape(numbers, [self._format.size]))
        state = policy.follow(tnp, state, measured, costs, self._predictions.burst)
        chosen = tf.where(agreed >= 0, agreed, state.choice)
        report.log_switches(self.auto, self.nbytes, costs, state, chosen, show=self._rank == 0)
        state = policy.in_step(state, chosen, trial, measurement.committed)
        value, target = policy.value_of(tnp, state, prior), self._target(tf.cast(measurement.step, tf.int32))
        sizes, traced = self._predictions.sizes, self.traces.candidates
        state, choice, tried = policy.propose(rules, state, costs, value, sizes, target, traced)
        assigned = [variable.assign(new, read_value=False) for variable, new in zip(self.state, state)]
        with tf.control_dependencies(assigned):  # before the host reads them
            return tf.identity(choice), tf.identity(tried)

    def _end_step(
        self,
        running: Sequence[int],
        step: np.int64,
        committed: np.bool_,
        timestamps: np.ndarray,
        choice: np.ndarray,
        tried: np.int32,
        probe: np.ndarray,
        agreed: np.ndarray,
        counts: np.ndarray,
    ) -> np.ndarray:
        """What the host does at the end of a step. Returns this rank's numbers, float32 [S], see `StepNumbers`.

        Args:
            running: The candidates that the running function has traced, see `Traces.watch`.
            step: The number of steps before.
            committed: Whether its new state was assigned.
            timestamps: Those of the buckets, see `clock.stacked`.
            choice: The proposed choice, int32 [B].
            tried: The proposed trial.
            probe: What `probe` returned.
            agreed: The numbers of the step before, their mean over the ranks.
            counts: `State.embedding_counts`.
        """
        times = self._timer.measure(timestamps)
        self.traces.set_first_exchange(float(timestamps[0, 0]))
        if self._warms_up:
            self._follow_warmup(int(step) + 1)
            if not self._warms_up and self._rank == 0:
                report.log_end_of_warmup(self.auto, self._first_choice.numpy())
            return np.zeros(self._format.size, np.float32)
        wanted = self.traces.watch(running, int(step), agreed, counts, self._timer.restart)
        self._renew_sample()
        if not committed:
            times = StepTimes.unknown(len(times.wire))
        return self._format.pack(choice, tried, probe, times, wanted)

    def _renew_sample(self) -> None:
        """Makes the sample that the next trace simulates, unless `_sample` already has the candidates to be measured.

        That trace cannot make its variables: a tf.function creates variables in its first trace only.
        """
        measured = self.traces.measured
        if self._warms_up or not measured:
            self._sample = None
        elif self._sample is None or self._sample.columns != measured:
            with tf.init_scope():
                self._sample = self._new_sample(measured)

    # The parts of a step's graph

    @property
    def _model_wide(self) -> list[int]:
        """The traced candidates that are model-wide."""
        return [c for c in self.traces.candidates if self.auto.candidates[c].model_wide]

    @property
    def _per_bucket(self) -> list[int]:
        """The other traced candidates."""
        return [c for c in self.traces.candidates if not self.auto.candidates[c].model_wide]

    def _is_idle(self) -> tf.Tensor:
        """Whether nothing is compressed and no residual is left; a bool scalar."""
        with tf.device("CPU"):
            both = tf.stack([self.state.now.read_value(), self.state.before.read_value()])
            return tf.reduce_all(tf.gather(tf.constant(self._uncompressed), both))

    def _place_of(self, candidate: tf.Tensor, among: Sequence[int]) -> tf.Tensor:
        """The candidate's position in the list `among`; the list's length if it is not there."""
        places = [among.index(c) if c in among else len(among) for c in range(len(self.auto.candidates))]
        with tf.device("CPU"):
            return tf.gather(tf.constant(places), candidate)

    def _target(self, step: tf.Tensor) -> tf.Tensor:
        """The target of objective="step" in a step."""
        target = tf.constant(0.0)
        for first, new_target in self.auto.targets():
            target = tf.where(step >= first, new_target, target)
        return target
