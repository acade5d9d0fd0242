"""`AutoSelector`: the variables and measurements of `auto`.

1. In step t, each rank measures how long its exchanges take. In some steps, it also probes how much each candidate
   would lose.
2. In step t + 1, these numbers are reduced over the ranks, along with the uncompressed gradients. Then all ranks know
   the same numbers. They follow the link and compute the best choice.
3. In step t + 2, rank 0's choice is sent. The others follow it: ranks that round differently may have another one.
4. From step t + 3 on, all ranks use this choice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..common import tracing
from ..compressors import Auto, Compressor
from ..engine import clock
from ..engine.compression_report import BucketReport
from ..engine.model_layout import ModelLayout
from ..engine.observer import StepMeasurement
from ..engine.plan import Plan
from ..engine.selector import ModelSelector, Result, switch_case
from . import policy, probe, report

_NAME = "hvdc_auto"  # of variables
# The wire times of ranks are sent in so many places, for a minimum over them; with more ranks, some share a place.
_PLACES = 16
# The times of the first steps are ignored: kernels are compiled, connections are made.
_UNTIMED = 2


class AutoSelector(ModelSelector):
    """The selector for the buckets of `auto`; `start.selector` makes it.

    Args:
        plan: The plan.
        costs: Predicted costs of each bucket and candidate.
        prior: The share of its energy that each bucket would lose if it were noise, float32 [B, C].
        choice: The first choice: the position of each bucket's candidate, int32 [B].

    Attributes:
        auto: The compressor `auto`.
        nbytes: Bytes of each bucket, as float32.
        state: What the choice is based on: a `policy.State` of tf.Variables on the host.
    """

    def __init__(self, plan: Plan, costs: policy.Costs, prior: tf.Tensor, choice: tf.Tensor) -> None:
        # Not the plan: it refers to its selectors, and a circle would keep its memory until a garbage collection.
        self._layout, self._plan_state, self._settings = plan.layout, plan.state, plan.settings
        self._costs, self._prior = costs, prior
        self.auto: Auto = plan.layout.auto
        self.nbytes = nbytes_of(plan.layout)
        self._place = {b: place for place, b in enumerate(plan.layout.auto_buckets)}
        self._ranks, self._rank = plan.settings.process_set.size(), plan.settings.process_set.rank()
        candidates = list(enumerate(self.auto.candidates))
        self._uncompressed = [candidate.uncompressed for _, candidate in candidates]
        # The positions of model-wide candidates, and of the others.
        self._model_wide = [c for c, candidate in candidates if candidate.model_wide]
        self._per_bucket = [c for c, candidate in candidates if not candidate.model_wide]
        b, c = len(self.nbytes), len(self.auto.candidates)
        places = min(self._ranks, _PLACES)
        self._members = np.bincount(np.arange(self._ranks) % places, minlength=places)
        self._fields = {
            "votes": (b,), "trial": (), "energy": (c + 1,), "wire": (places,), "span": (), "exchange": (b,),
            "waits": (b,), **({"model_wide": (2,)} if self._model_wide else {}),
        }  # fmt: skip
        with tf.device("CPU"):
            self.state = policy.State(*(tracing.variable(value, _NAME) for value in policy.initial(choice, c)))
            self._numbers = tracing.variable(tf.zeros([sum(map(math.prod, self._fields.values()))]), _NAME)

    # Selector

    def switch(self, bucket: int, exchange: Callable[[Compressor], Result]) -> Result:
        """The exchange with the bucket's candidate, which is not model-wide."""
        index = self.choice(bucket)
        if self._model_wide:
            index = self._place_of(index, self._per_bucket)
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

    def probe(self, step: tf.Tensor, gradients: Sequence[Any]) -> tf.Tensor:
        """Probes all candidates on a sample of one bucket, if a probe is due.

        Returns:
            [C + 1]: the energy that each candidate loses, and the chunk's energy; zeros if no probe is due.
        """
        decay = self._settings.residual_decay
        samples = [probe.sample_of(self._layout, self._plan_state, gradients, b, decay) for b in self._place]
        index, is_due = self._probe_index(step)
        nothing = tf.zeros([len(self.auto.candidates) + 1])
        return tf.cond(is_due, lambda: probe.energies(self.auto, index % len(samples), samples), lambda: nothing)

    def switch_model(
        self,
        per_bucket: Callable[[], Any],
        uncompressed: Callable[[], Any],
        model_wide: Callable[[int, tf.Tensor], Any],
        step: tf.Tensor,
    ) -> Any:
        """The exchange that holds for all buckets; see `ModelSelector.switch_model`."""
        may_be_idle = any(self._uncompressed)
        if not self._model_wide:
            return tf.cond(self._is_idle(), uncompressed, per_bucket) if may_be_idle else per_bucket()
        branches: list[Callable[[], Any]] = [
            functools.partial(lambda c: model_wide(c, self._probe_index(step)[1]), c) for c in self._model_wide
        ]
        branches += [per_bucket] if self._per_bucket else []
        with tf.device("CPU"):
            index = self._place_of(self.state.now.read_value()[0], self._model_wide)
            if may_be_idle:
                index = tf.where(self._is_idle(), len(branches), index)
                branches.append(uncompressed)
        return switch_case(index, branches)

    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables, by the names that checkpoints use."""
        return {f"auto_{name}": variable for name, variable in self.state._asdict().items()}

    def report(self, step: int) -> list[BucketReport]:
        """The reports of the buckets after `step` steps."""
        state = policy.State(*(tf.convert_to_tensor(variable) for variable in self.state))
        return report.of_buckets(self.auto, self.nbytes, self._costs, self._prior, state, step)

    # Observer

    def wants_times(self, bucket: int) -> bool:
        """Whether the bucket is one of `auto`."""
        return bucket in self._place

    def observe(self, measurement: StepMeasurement) -> None:
        """Updates the state with the numbers of the step before, and keeps those of this step for the next one."""
        step = measurement.step
        assert measurement.agreed is not None
        with tf.device("CPU"):
            state = policy.State(*(variable.read_value() for variable in self.state))
            fields = self._unpack(measurement.agreed if self._settings.averages else measurement.agreed / self._ranks)
            votes, trial = (self._voted(fields.pop(name)) for name in ("votes", "trial"))
            probed, _ = self._probe_index(step - 1)
            # The smallest wire time: it is that of the ranks that were last, which did not wait for others.
            fields["wire"] = tf.reduce_min(fields["wire"] * (self._ranks / self._members))
            state = policy.follow(state, policy.Measured(probed=probed % len(self.nbytes), **fields), self._costs)
            chosen = tf.where(votes >= 0, votes, state.choice)
            report.log_switches(self.auto, self.nbytes, self._costs, state, chosen, show=self._rank == 0)
            state = policy.in_step(state, chosen, trial, measurement.committed)
            state, *votes = propose(self.auto, state, self._costs, self._prior, self.nbytes, tf.cast(step, tf.int32))
            for variable, value in zip(self.state, state):
                variable.assign(value)
            self._numbers.assign(self._pack(measurement, votes))

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

    def _probe_index(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The number of probes before this step, and whether one is due in it."""
        with tf.device("CPU"):
            step = tf.cast(step, tf.int32)
            # First one bucket in each step, then the buckets in turn, every `probe_every` steps.
            early, every = len(self.nbytes), self.auto.probe_every
            index = tf.where(step < early, step, early + (step - early) // every)
            return index, (step < early) | ((step - early) % every == 0)

    def _voted(self, field: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.round(field * self._ranks), tf.int32) - 1

    def _pack(self, measurement: StepMeasurement, votes: Sequence[tf.Tensor]) -> tf.Tensor:
        """This step's numbers, in the order of `_fields`. The votes: the proposed choice, and the candidate to try."""
        committed = measurement.committed
        buckets = (measurement.buckets[b] for b in self._place)
        ready, encoded, received, decoded = clock.since_first([b.timestamps for b in buckets if b is not None])
        before = tf.concat([ready[:1], encoded[:-1]], 0)  # when the bucket before was encoded
        # Horovod may fuse buckets, which then arrive together.
        free = tf.concat([encoded[:1], policy.running_max(received)[:-1]], 0)  # when the wire is free
        wire = tf.nn.relu(received - tf.maximum(encoded, free))
        exchange = wire + tf.nn.relu(encoded - ready) + tf.nn.relu(decoded - received)
        places = len(self._members)
        own = tf.one_hot(self._rank % places, places)
        own_votes = [tf.cast(value + 1, tf.float32) * float(self._rank == 0) for value in votes]
        times = [own * tf.reduce_sum(wire), tf.reduce_max(decoded), exchange, tf.nn.relu(ready - before)]
        # The times of steps that were not committed are ignored.
        timed = committed & (measurement.step >= _UNTIMED)
        times = [tf.where(timed, value, tf.zeros_like(value)) for value in times]
        lost = [tf.where(committed, measurement.model_wide_loss, tf.zeros([2]))] if self._model_wide else []
        flat = tf.concat([tf.reshape(value, [-1]) for value in (*own_votes, measurement.probe, *times, *lost)], 0)
        return tf.where(tf.math.is_finite(flat), flat, tf.zeros_like(flat))

    def _unpack(self, flat: tf.Tensor) -> dict[str, tf.Tensor]:
        sizes = [math.prod(shape) for shape in self._fields.values()]
        parts = tf.split(tf.ensure_shape(flat, [sum(sizes)]), sizes)
        return {name: tf.reshape(part, self._fields[name]) for name, part in zip(self._fields, parts)}


def propose(
    auto: Auto, state: policy.State, costs: policy.Costs, prior: tf.Tensor, nbytes: Sequence[int], step: tf.Tensor
) -> tuple[policy.State, tf.Tensor, tf.Tensor]:
    """Calls `policy.propose` with the lost shares and the target of this step."""
    lost, sizes = policy.shares(state, prior), tf.constant(nbytes, tf.float32)
    target = tf.constant(0.0)
    for first, value in auto.targets():
        target = tf.where(step >= first, value, target)
    uncompressed = [candidate.uncompressed for candidate in auto.candidates]
    model_wide = auto.model_wide_candidates
    return policy.propose(state, costs, uncompressed, lost, sizes, target, auto.max_slowdown, model_wide)


def nbytes_of(layout: ModelLayout) -> list[int]:
    """Bytes of each bucket of `auto`, as float32."""
    return [4 * sum(shape[0] for shape in layout.shapes_of(b)) for b in layout.auto_buckets]
