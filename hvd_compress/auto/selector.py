"""`AutoSelector`: the variables and measurements of `auto`.

1. In step t, each rank measures how long its exchanges take. In some steps, it also measures how much progress each
   candidate makes.
2. In step t + 1, these numbers are reduced over the ranks, along with the uncompressed gradients. Then all ranks know
   the same numbers. They follow the link and compute the best choice.
3. In step t + 2, rank 0's choice is sent. The others follow it: ranks that round differently may have another one.
4. From step t + 3 on, all ranks use this choice.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..common import tracing
from ..common.phases import Phase
from ..compressors import Auto, Compressor, Seeds
from ..engine import clock
from ..engine.compression_report import BucketReport
from ..engine.model_layout import ModelLayout
from ..engine.observer import StepMeasurement
from ..engine.plan import Plan
from ..engine.selector import ModelSelector, Result, switch_case
from . import policy, report
from .comparisons import Comparisons
from .progress import ROWS, ProgressSample
from .rows import RowSavings
from .step_times import StepTimer

_NAME = "hvdc_auto"  # of variables
# The wire times of ranks are sent in so many places, for a minimum over them; with more ranks, some share a place.
_PLACES = 16
# For each candidate, a later trace takes about so many times as long as the first one. With a second candidate it was
# 1.0 for a transformer, and 1.7 for a small CNN.
_TRACE_FACTOR = 1.5


class AutoSelector(ModelSelector):
    """The selector for the buckets of `auto`; `start.selector` makes it.

    Args:
        plan: The plan.
        costs: Predicted costs of each bucket and candidate.
        prior: What candidates are worth at least.
        usual: The progress that candidates usually make, float32 [C].
        choice: The first choice: the position of each bucket's candidate, int32 [B].
        savings: What compressing the rows of embeddings saves.
        compresses_rows: Whether they are compressed in the first step; the same on all ranks.
        others: Costs [B, 1] of compressors that reports compare with, by their spec strings.

    Attributes:
        auto: The compressor `auto`.
        nbytes: Bytes of each bucket, as float32.
        state: What the choice is based on: a `policy.State` of tf.Variables on the host.
    """

    def __init__(
        self,
        plan: Plan,
        costs: policy.Costs,
        prior: policy.Value,
        usual: np.ndarray,
        choice: tf.Tensor,
        savings: RowSavings,
        compresses_rows: bool,
        others: Mapping[str, policy.Costs],
    ) -> None:
        # Not the plan: it refers to its selectors, and a circle would keep its memory until a garbage collection.
        self._settings = plan.settings
        self._costs, self._prior, self._usual, self._rules = costs, prior, usual, rules_of(plan.layout.auto)
        self._others, self._savings = others, savings
        self._counts, self._step = plan.state.embedding_counts, plan.state.step
        # What a second of a step with each candidate is worth at least, in seconds without compression.
        progress = np.maximum(prior.progress.numpy(), self._usual)
        self._worth = ((1.0 + plan.layout.auto.max_slowdown * prior.lost.numpy()) / progress).tolist()
        self._comparisons = Comparisons()
        self._held_from: tuple[list[int], tf.Tensor] | None = None  # while it is held: what was traced and chosen
        self.auto: Auto = plan.layout.auto
        self.nbytes = nbytes_of(plan.layout)
        self._sizes = np.array(self.nbytes, np.float32)
        self._place = {b: place for place, b in enumerate(plan.layout.auto_buckets)}
        self._ranks, self._rank = plan.settings.process_set.size(), plan.settings.process_set.rank()
        self._uncompressed = [candidate.uncompressed for candidate in self.auto.candidates]
        b, c = len(self.nbytes), len(self.auto.candidates)
        # Positions of the candidates that steps are traced with.
        self._traced = list(range(c)) if traces_all(self.auto) else sorted(set(choice.numpy().tolist()))
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()  # which trace steps
        self._timer = StepTimer()
        self._made = time.time()
        self._trace_seconds = 0.0  # from `_made` to the first exchange
        places = min(self._ranks, _PLACES)
        self._members = np.bincount(np.arange(self._ranks) % places, minlength=places)
        self._fields = {
            "votes": (b,), "trial": (), "progress": (ROWS, c), "wire": (places,), "exchange": (b,), "waits": (b,),
            "rest": (), "span": (), "wanted": (c + 1,),
        }  # fmt: skip
        self._rest_at = -3 - c
        self._follows = len(self._traced) == 1  # whether `_watch` follows the measurements, or the graph does
        self._time_per_byte = 1.0  # the factor in `state.link`, as `_watch` knows it
        with tf.device("CPU"):
            self.state = policy.State(*(tracing.variable(value, _NAME) for value in policy.initial(choice, c)))
            self._numbers = tracing.variable(tf.zeros([sum(map(math.prod, self._fields.values()))]), _NAME)
            self._rows = tracing.variable(tf.constant(compresses_rows), _NAME)  # `compresses_rows`, for checkpoints
        self.compresses_rows = compresses_rows
        settings = plan.settings
        decays = [settings.residual_decay if settings.feeds_back(c) else 0.0 for c in self.auto.candidates]
        shapes = {i: plan.layout.shapes[i] for i in plan.layout.model_wide.tensors.members}
        self._new_sample = functools.partial(ProgressSample, self.auto, shapes, decays, settings.adaptive)
        self._sample = self._new_sample(self._traced) if len(self._traced) > 1 else None

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

    def numbers(self) -> tf.Tensor:
        """This rank's measurements of the step before, float32 [S]."""
        with tf.device("CPU"):
            return self._numbers.read_value()

    def probe(self, seeds: Seeds, gradients: Sequence[Any]) -> tf.Tensor:
        """Simulates the candidates on a sample of the gradients; see `ProgressSample.measure`."""
        self._functions.update(tracing.running_functions())
        if self._sample is None:
            return tf.zeros([ROWS, len(self.auto.candidates)])
        # The mean over the ranks varies less than the numbers of one of them.
        variances = tf.constant([[1.0], [1.0], [1.0 / self._ranks], [1.0], [1.0]])
        return self._sample.measure(seeds, gradients) * variances

    def switch_model(
        self,
        per_bucket: Callable[[], Any],
        uncompressed: Callable[[], Any],
        model_wide: Callable[[int], Any],
    ) -> Any:
        """The exchange that holds for all buckets; see `ModelSelector.switch_model`."""
        traced_uncompressed = [self._uncompressed[c] for c in self._traced]
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
                if self._held_from is None:
                    self._held_from = (self._traced, tf.identity(self.state.choice))
                self._traced, choice = [candidate], tf.fill([len(self.nbytes)], candidate)
            elif self._held_from is not None:
                (self._traced, choice), self._held_from = self._held_from, None
            else:
                return
            self._sample = self._new_sample(self._traced) if len(self._traced) > 1 else None
            self._follows = len(self._traced) == 1
            for variable in (self.state.choice, self.state.now, self.state.before):
                variable.assign(choice)
            # The next trace is not a part of a step, and nothing is known of the step before.
            self._numbers.assign(tf.zeros_like(self._numbers))
            self._comparisons.take()
            self._timer.restart()

    def restored(self, choice: bool) -> None:
        """Called on all ranks after a checkpoint set the residuals and the state; `choice`: also the choice."""
        with tf.init_scope():  # also called while a step is traced
            used = {c for variable in (self.state.choice, self.state.now, self.state.before) for c in variable.numpy()}
            if not choice and all(self._uncompressed[c] for c in used) and not all(self._uncompressed):
                # As if the residuals came from the step before: the next one sends them.
                before = self._uncompressed.index(False)
                self.state.before.assign(tf.fill([len(self.nbytes)], before))
                used.add(before)
            # Rows that were not compressed have no residuals.
            compressed_rows = {len(self.auto.candidates)} if self._rows.numpy() else set()
            self._rows.assign(self.compresses_rows)
            self._time_per_byte = float(self.state.link[1])
            self._numbers.assign(tf.zeros_like(self._numbers))  # those of the step before the checkpoint was loaded
            self._timer.restart()  # the next step may be traced, and connects the ranks
            self._comparisons.take()
            self._trace(used | compressed_rows)

    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables, by the names that checkpoints use."""
        return {f"auto_{name}": variable for name, variable in self.state._asdict().items()} | {"auto_rows": self._rows}

    def report(self, step: int) -> list[BucketReport]:
        """The reports of the buckets after `step` steps."""
        state = self._followed(self._comparisons.seen())
        is_measured = state.progress.numpy()[-1] > 0.0
        assumed = np.where(is_measured, self._prior.progress, np.maximum(self._prior.progress, self._usual))
        prior = self._prior._replace(progress=tf.constant(assumed))
        known = report.Known(self.auto, self.nbytes, self._costs, self._others, prior, state)
        return report.of_buckets(known, step)

    # Observer

    def wants_times(self, bucket: int) -> bool:
        """Whether the bucket is one of `auto`."""
        return bucket in self._place

    def observe(self, measurement: StepMeasurement) -> None:
        """Updates the state with the numbers of the step before, and keeps those of this step for the next one."""
        assert measurement.agreed is not None
        with tf.device("CPU"):
            numbers = measurement.agreed if self._settings.averages else measurement.agreed / self._ranks
            choice, tried = self.state.choice.read_value(), tf.constant(-1)
            if len(self._traced) > 1:
                choice, tried = self._propose(measurement, numbers)
            watched = tuple(self._traced) if not all(self._mask()) and self._held_from is None else ()
            counts = tf.zeros([0, 3], tf.int64) if self._counts is None else self._counts.read_value()
            buckets = [bucket.timestamps for b in self._place if (bucket := measurement.buckets[b]) is not None]
            own = tf.numpy_function(
                functools.partial(self._end_step, watched),
                [measurement.step, measurement.committed, clock.stacked(buckets), choice, tried, measurement.probe,
                 numbers, counts],
                tf.float32,
            )  # fmt: skip
            self._numbers.assign(tf.ensure_shape(own, self._numbers.shape))

    def _propose(self, measurement: StepMeasurement, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Updates the state. Returns the proposed choice, int32 [B], and the candidate to try."""
        state = policy.State(*(variable.read_value() for variable in self.state))
        votes, trial, measured = self._unpack(numbers)
        state = policy.follow(state, measured, self._costs)
        chosen = tf.where(votes >= 0, votes, state.choice)
        report.log_switches(self.auto, self.nbytes, self._costs, state, chosen, show=self._rank == 0)
        state = policy.in_step(state, chosen, trial, measurement.committed)
        value, target = policy.value_of(state, self._prior), self._target(tf.cast(measurement.step, tf.int32))
        state, choice, tried = policy.propose(self._rules, state, self._costs, value, self._sizes, target, self._traced)
        assigned = [variable.assign(new, read_value=False) for variable, new in zip(self.state, state)]
        with tf.control_dependencies(assigned):  # before the host reads them
            return tf.identity(choice), tf.identity(tried)

    # Candidates are traced when they are first worth it. The first steps have the first choice only, as if it were a
    # fixed compressor.

    @property
    def _model_wide(self) -> list[int]:
        """The traced candidates that are model-wide."""
        return [c for c in self._traced if self.auto.candidates[c].model_wide]

    @property
    def _per_bucket(self) -> list[int]:
        """The other traced candidates."""
        return [c for c in self._traced if not self.auto.candidates[c].model_wide]

    def _watch(self, running: Sequence[int], step: np.int64, numbers: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Decides whether more should be traced, from the `numbers` of a step and its `embedding_counts`.

        The function that runs now has traced the candidates `running`. They may be fewer than those in `_traced`, until
        it is called again. Returns what this rank wants to be traced, see `_mask`.
        """
        # In each step, on a core that training needs: nothing here calls TensorFlow before a comparison is due.
        self._follows = len(running) == 1
        mask = self._mask()
        rest, span, *wanted = numbers[self._rest_at :].tolist()  # wanted by rank 0
        missing = [i for i, traced in enumerate(mask.tolist()) if wanted[i] > 0.0 and not traced]
        most = self._most_saved(running[0], rest, span, counts) if self._follows else math.inf
        due = self._comparisons.add(numbers, span, most)
        if not due and not missing:
            return mask
        with tf.init_scope(), tf.device("CPU"):
            state = self._followed(self._comparisons.take())
            if self._follows:
                for variable, new in zip(self.state, state):
                    variable.assign(new)
                self._time_per_byte = float(state.link[1])
            if missing:
                self._timer.restart()
                self._trace(missing)
                if self._rank == 0:
                    names = [*(candidate.spec for candidate in self.auto.candidates), "compressed rows of embeddings"]
                    report.log_trace([names[i] for i in missing])
                    self._say_if_slow(int(step))
            more = self._worth_tracing(state, int(step), running, counts) if self._rank == 0 else frozenset()
        return self._mask(more)

    def _say_if_slow(self, step: int) -> None:
        """Says that the next step is being traced again, if that takes long."""
        counter, functions = self._step, self._functions

        def is_over() -> bool:
            return int(counter) > step + 1 or tracing.running_functions().isdisjoint(functions)

        usual = f"the first trace took {self._trace_seconds:.0f} s"
        Phase("tracing the step again", usual, is_over=is_over).begin()

    def _followed(self, numbers: Sequence[np.ndarray]) -> policy.State:
        """The state after some steps with their numbers, which the graph has not taken into account."""
        state = policy.State(*(tf.convert_to_tensor(variable) for variable in self.state))
        for one in numbers if self._follows else ():
            _, _, measured = self._unpack(tf.constant(one))
            state = policy.follow(state._replace(steady=tf.constant(True)), measured, self._costs)
        return state

    def _most_saved(self, now: int, rest: float, span: float, counts: np.ndarray) -> float:
        """Seconds of a step with the candidate `now` that others might save, the same on all ranks.

        This is a bound that is quick to compute.
        """
        rows = 0.0
        if not self.compresses_rows:
            link = self._time_per_byte * max(1.0, self._comparisons.slowdown(span))
            rows = self._savings.now(counts, link)
        # No exchange takes less than no time, and no candidate makes more progress than no compression.
        return max((rest + span) * self._worth[now] - rest, rows)

    def _worth_tracing(
        self, state: policy.State, step: int, running: Sequence[int], counts: np.ndarray
    ) -> frozenset[int]:
        """Positions in `_mask` of what might save most beyond the trace that it takes, in as many steps as so far."""
        measured = running if len(running) > 1 else []
        value = policy.value_of(state, self._prior)
        picks, saved = policy.possible_saving(
            self._rules, state, self._costs, value, self._sizes, self._usual, measured
        )
        if not float(state.rest) > 0.0:
            return frozenset()
        more = frozenset(int(c) for c in picks) - frozenset(self._traced)
        rows = frozenset([len(self.auto.candidates)] if not self.compresses_rows else [])
        saved_by_more = float(saved) if more else 0.0
        saved_by_rows = self._savings.now(counts, float(state.link[1])) if rows else 0.0
        # The first step itself is not a part of its trace, which may come before several backward passes.
        once = max(0.0, self._trace_seconds - float(state.rest))
        saved_by = {more: saved_by_more, rows: saved_by_rows, more | rows: saved_by_more + saved_by_rows}
        gains = {
            new: seconds * step - once * _TRACE_FACTOR * (len(self._traced) + len(new & more))
            for new, seconds in saved_by.items()
            if new
        }
        return max((new for new in gains if gains[new] > 0.0), key=lambda new: gains[new], default=frozenset())

    def _mask(self, more: Iterable[int] = ()) -> np.ndarray:
        """What is traced, and `more`: 1 for each traced candidate, then 1 for compressed rows; float32 [C + 1]."""
        mask = np.zeros(len(self.auto.candidates) + 1, np.float32)
        mask[[*self._traced, *more]] = 1.0
        mask[-1] = mask[-1] or self.compresses_rows
        return mask

    def _trace(self, more: Iterable[int]) -> None:
        """Lets the next step be traced again, with more positions in `_mask`."""
        *candidates, rows = self._mask(more).tolist()
        traced = np.flatnonzero(candidates).tolist()
        if (traced, rows) != (self._traced, self.compresses_rows):
            if traced != self._traced:
                self._traced, self._sample = traced, self._new_sample(traced)
            self.compresses_rows = bool(rows)
            self._rows.assign(self.compresses_rows)
            # What runs now may have another trace than the one that `_functions` had last.
            tracing.forget_traces(tracing.running_functions() | set(self._functions))

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

    def _voted(self, field: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.round(field * self._ranks), tf.int32) - 1

    def _end_step(
        self,
        watched: Sequence[int],
        step: np.int64,
        committed: np.bool_,
        timestamps: np.ndarray,
        choice: np.ndarray,
        tried: np.int32,
        probe: np.ndarray,
        agreed: np.ndarray,
        counts: np.ndarray,
    ) -> np.ndarray:
        """What the host does at the end of a step. Returns the step's numbers, float32 [S], in the order of `_fields`.

        Args:
            watched: The candidates that the running function has traced, see `_watch`; empty if no more may be traced.
            step: The number of steps before.
            committed: Whether its new state was assigned.
            timestamps: Those of the buckets, see `clock.stacked`.
            choice: The proposed choice, int32 [B].
            tried: The proposed trial.
            probe: What `probe` returned.
            agreed: The numbers of the step before, of all ranks.
            counts: `State.embedding_counts`.
        """
        waits, coding, wire, span, rest = self._timer.measure(timestamps)
        self._trace_seconds = self._trace_seconds or float(timestamps[0, 0]) - self._made
        wanted = self._watch(watched, step, agreed, counts) if watched else self._mask()
        of_rank = np.zeros(len(self._members))
        of_rank[self._rank % len(of_rank)] = wire.sum()
        # The times of steps that were not committed are ignored.
        times = float(committed) * np.concatenate([of_rank, wire + coding, waits, [rest, span]])
        votes, decides = np.append(choice, tried) + 1, float(self._rank == 0)
        flat = np.concatenate([decides * votes, probe.ravel(), times, decides * wanted]).astype(np.float32)
        return np.where(np.isfinite(flat), flat, np.float32(0.0))

    def _unpack(self, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, policy.Measured]:
        """The agreed choice, int32 [B], the candidate to try, and the measurements."""
        sizes = [math.prod(shape) for shape in self._fields.values()]
        parts = tf.split(tf.ensure_shape(numbers, [sum(sizes)]), sizes)
        fields = {name: tf.reshape(part, self._fields[name]) for name, part in zip(self._fields, parts)}
        del fields["wanted"]
        votes, trial = (self._voted(fields.pop(name)) for name in ("votes", "trial"))
        # The smallest wire time: it is that of the ranks that were last, which did not wait for others.
        fields["wire"] = tf.reduce_min(fields["wire"] * (self._ranks / self._members))
        return votes, trial, policy.Measured(**fields)

    def _target(self, step: tf.Tensor) -> tf.Tensor:
        """The target of objective="step" in a step."""
        target = tf.constant(0.0)
        for first, new_target in self.auto.targets():
            target = tf.where(step >= first, new_target, target)
        return target


def rules_of(auto: Auto) -> policy.Rules:
    """What `auto` may choose, and what it looks for."""
    uncompressed = [candidate.uncompressed for candidate in auto.candidates]
    by_progress = auto.objective == "progress"
    return policy.Rules(
        uncompressed, auto.model_wide_candidates, auto.max_slowdown, by_progress, auto.min_progress, auto.budget
    )


def traces_all(auto: Auto) -> bool:
    """Whether all candidates are traced at once: limits are kept with measurements of all of them."""
    is_limited = auto.objective == "step" or auto.min_progress or auto.budget
    return bool(is_limited) or not tracing.can_forget_traces()


def nbytes_of(layout: ModelLayout) -> list[int]:
    """Bytes of each bucket of `auto`, as float32."""
    return [4 * sum(shape[0] for shape in layout.shapes_of(b)) for b in layout.auto_buckets]
