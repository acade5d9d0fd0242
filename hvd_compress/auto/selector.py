"""What `auto` keeps and measures from step to step.

In step t each rank measures how long its exchanges take, and every so often how much each candidate would let
through. In step t + 1 these numbers cross with the uncompressed gradients; all ranks then know the same, follow
the link with it, and work out the best choice. Rank 0's crosses in step t + 2 and holds from step
t + 3 on: ranks whose processors round differently need not find the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Callable

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common import tracing
from ..compressors import Auto, Compressor
from ..engine import clock
from . import policy, probe, report
from .probe import Sample, switch

# Among how many ranks' waiting times the shortest is looked for; beyond, some share a place.
_PLACES = 16
# The times of the first steps tell nothing: what is left to compile is compiled, connections are made.
_UNTIMED = 2


class AutoSelector:
    """Chooses for the buckets of one plan.

    Attributes:
        auto: The settings.
        nbytes: Of each bucket, as float32.
        state: What the choice rests on: a `policy.State` of tf.Variables on the host.
    """

    def __init__(
        self,
        auto: Auto,
        process_set: Any,
        op: Any,
        nbytes: Sequence[int],
        costs: policy.Costs,
        lost: Sequence[float],
    ) -> None:
        """Makes the first choice; rank 0's numbers decide.

        Args:
            auto: The settings.
            process_set: The ranks; all of them must make the selector.
            op: hvd.Average or hvd.Sum, with which the agreed numbers are reduced.
            nbytes: Of each bucket, as float32.
            costs: Predicted, float [B, C].
            lost: [C], the share of the energy of noise that each candidate does not let through.
        """
        self.auto = auto
        self.nbytes = list(nbytes)
        self._ranks, self._rank = process_set.size(), process_set.rank()
        self._average = op == hvd.Average
        self._plain = [candidate.uncompressed for candidate in auto.candidates]
        # Candidates that are for all buckets at once, and the others.
        self._whole = [c for c, is_whole in enumerate(auto.model_wide_candidates) if is_whole]
        self._flat = [c for c, is_whole in enumerate(auto.model_wide_candidates) if not is_whole]
        b, c = len(self.nbytes), len(auto.candidates)
        places = min(self._ranks, _PLACES)
        self._members = np.bincount(np.arange(self._ranks) % places, minlength=places)
        self._fields = {
            "votes": (b,), "trial": (), "energy": (c + 1,), "wire": (places,), "span": (), "exchange": (b,),
            "waits": (b,), **({"whole": (2,)} if self._whole else {}),
        }  # fmt: skip
        root = process_set.ranks[0]
        with tf.device("CPU"):
            table = tf.constant(np.concatenate([np.ravel(x) for x in (*costs, lost)]), tf.float32)
            table = hvd.broadcast(table, root, name="hvdc_costs", process_set=process_set).numpy()
            self.costs = policy.Costs(*(tf.constant(x) for x in table[: 4 * b * c].reshape(4, b, c)))
            self.prior = tf.constant(np.broadcast_to(table[4 * b * c :], (b, c)))
            first = policy.initial(tf.zeros([b], tf.int32), c)
            # Without hesitation.
            first = first._replace(evidence=tf.constant(math.inf))
            _, choice, _ = self._proposal(first, tf.constant(0))
            choice = hvd.broadcast(choice, root, name="hvdc_first_choice", process_set=process_set)
            self.state = policy.State(*map(_variable, policy.initial(choice, c)))
            self._outgoing = _variable(tf.zeros([sum(map(math.prod, self._fields.values()))]))
        if self._rank == 0:
            report.log_start(self)

    # One step

    def outgoing(self) -> tf.Tensor:
        """What this rank tells the others in this step, float32 [S]: to be reduced with `op`."""
        with tf.device("CPU"):
            return self._outgoing.read_value()

    def chosen(self) -> list[Compressor]:
        """The compressor of each bucket."""
        return [self.auto.candidates[c] for c in self.state.choice.numpy()]

    def choices(self) -> tf.Tensor:
        """Which candidate each bucket has in this step, int32 [B]."""
        with tf.device("CPU"):
            return self.state.now.read_value()

    @property
    def may_be_idle(self) -> bool:
        """Whether no compression is among the candidates."""
        return any(self._plain)

    def is_idle(self) -> tf.Tensor:
        """Whether nothing is compressed and no residual is left; a bool scalar."""
        with tf.device("CPU"):
            both = tf.stack([self.state.now.read_value(), self.state.before.read_value()])
            return tf.reduce_all(tf.gather(tf.constant(self._plain), both))

    def switch(self, bucket: int, branch: Callable[[Any], Any]) -> Any:
        """What `branch(compressor)` returns for the compressor that is chosen for this bucket alone."""
        with tf.device("CPU"):
            index = self.state.now.read_value()[bucket]
            if self._whole:
                index = self._place_of(index, self._flat)
        return switch(index, [functools.partial(branch, self.auto.candidates[c]) for c in self._flat])

    def switch_all(
        self, compressed: Callable[[], Any], plain: Callable[[], Any], whole: Callable[[int], Any]
    ) -> Any:
        """What that one returns which holds for all buckets in this step.

        Args:
            compressed: Exchanges each with its own candidate, see `switch`.
            plain: Exchanges all as they are; see `is_idle`.
            whole: Exchanges all at once with this candidate.
        """
        if not self._whole:
            return tf.cond(self.is_idle(), plain, compressed) if self.may_be_idle else compressed()
        branches: list[Callable[[], Any]] = [functools.partial(whole, c) for c in self._whole]
        branches += [compressed] if self._flat else []
        with tf.device("CPU"):
            index = self._place_of(self.state.now.read_value()[0], self._whole)
            if self.may_be_idle:
                branches.append(plain)
                index = tf.where(self.is_idle(), len(branches) - 1, index)
        return switch(index, branches)

    def _place_of(self, candidate: tf.Tensor, among: Sequence[int]) -> tf.Tensor:
        """The candidate's position in a list; the list's length if it is not there."""
        places = [among.index(c) if c in among else len(among) for c in range(len(self.auto.candidates))]
        return tf.gather(tf.constant(places), candidate)

    def nothing_in_use(self) -> Any:
        """In place of what a candidate for all buckets at once lost, [2]; nothing where there are none of these."""
        return tf.zeros([2]) if self._whole else ()

    def is_probed(self, step: tf.Tensor) -> tf.Tensor:
        """Whether candidates are tried in this step; a bool scalar."""
        return self._turn(step)[1]

    def probe(self, step: tf.Tensor, some: Sequence[Sample]) -> tf.Tensor:
        """Tries all candidates on a chunk of one bucket, if it is time to.

        Args:
            step: int64 scalar.
            some: One of each bucket.

        Returns:
            [C + 1]: the energy that each candidate loses, and that of the chunk; zeros if it is not time to.
        """
        turn, due = self._turn(step)
        nothing = tf.zeros([len(self.auto.candidates) + 1])
        return tf.cond(due, lambda: probe.energies(self.auto, turn % len(some), some), lambda: nothing)

    def _turn(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """How many probes were made before this step, and whether one is due in it."""
        with tf.device("CPU"):
            step = tf.cast(step, tf.int32)
            # Each bucket once at the beginning, and then in turn.
            early, every = len(self.nbytes), self.auto.probe_every
            turn = tf.where(step < early, step, early + (step - early) // every)
            return turn, (step < early) | ((step - early) % every == 0)

    def learn(
        self,
        step: tf.Tensor,
        agreed: tf.Tensor,
        stamps: Sequence[clock.Stamps],
        energy: tf.Tensor,
        in_use: Any,
        committed: tf.Tensor,
    ) -> None:
        """Takes in what was measured in the step before, and prepares what crosses in the next one.

        Args:
            step: int64 scalar: of this step, from 0 on.
            agreed: [S], the reduced `outgoing`.
            stamps: Of this step's buckets, in the order in which they crossed.
            energy: Of this step's `probe`.
            in_use: [2], the energies of the residuals and of gradients + residuals, if a candidate for all buckets at
                once was in use and candidates were tried; else `nothing_in_use`.
            committed: Whether this step's residuals were kept; if not, its times are not looked at.
        """
        with tf.device("CPU"):
            state = policy.State(*(variable.read_value() for variable in self.state))
            fields = self._unpack(agreed if self._average else agreed / self._ranks)
            probed, _ = self._turn(step - 1)
            seen = policy.Measured(
                # The ranks that were there last did not wait for others.
                tf.reduce_min(fields["wire"] * (self._ranks / self._members)),
                fields["span"],
                fields["exchange"],
                fields["waits"],
                probed % len(self.nbytes),
                fields["energy"],
                fields.get("whole"),
            )
            state = policy.follow(state, seen, self.costs)
            votes, trial = (self._voted(fields[name]) for name in ("votes", "trial"))
            chosen = tf.where(votes >= 0, votes, state.choice)
            report.log_switches(self, state, chosen, show=self._rank == 0)
            switched = policy.in_step(state, chosen, trial, committed)
            switched, proposal, tried = self._proposal(switched, tf.cast(step, tf.int32))
            for variable, value in zip(self.state, switched):
                variable.assign(value)
            timed = committed & (step >= _UNTIMED)
            lost = [tf.where(committed, in_use, tf.zeros([2]))] if self._whole else []
            self._outgoing.assign(self._pack(proposal, tried, stamps, energy, timed, lost))

    def _voted(self, field: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.round(field * self._ranks), tf.int32) - 1

    def _proposal(self, state: policy.State, step: tf.Tensor) -> tuple[policy.State, tf.Tensor, tf.Tensor]:
        target = tf.constant(0.0)
        for first, value in self.auto.targets():
            target = tf.where(step >= first, value, target)
        lost, nbytes = policy.shares(state, self.prior), tf.constant(self.nbytes, tf.float32)
        return policy.propose(
            state,
            self.costs,
            self._plain,
            lost,
            nbytes,
            target,
            self.auto.max_slowdown,
            self.auto.model_wide_candidates,
        )

    def _pack(
        self,
        proposal: tf.Tensor,
        tried: tf.Tensor,
        stamps: Sequence[clock.Stamps],
        energy: tf.Tensor,
        timed: tf.Tensor,
        lost: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """This step's numbers, in the order of `_fields`."""
        begun, sent, arrived, done = clock.since_first(stamps)
        encoded = tf.concat([begun[:1], sent[:-1]], 0)  # when the bucket before was
        # Horovod may send several at once, which then arrive together.
        free = tf.concat([sent[:1], policy.running_max(arrived)[:-1]], 0)  # when the wire is
        wire = tf.nn.relu(arrived - tf.maximum(sent, free))
        exchange = wire + tf.nn.relu(sent - begun) + tf.nn.relu(done - arrived)
        places = len(self._members)
        own = tf.one_hot(self._rank % places, places)
        votes = [tf.cast(value + 1, tf.float32) * float(self._rank == 0) for value in (proposal, tried)]
        times = [own * tf.reduce_sum(wire), tf.reduce_max(done), exchange, tf.nn.relu(begun - encoded)]
        times = [tf.where(timed, value, tf.zeros_like(value)) for value in times]
        flat = tf.concat([tf.reshape(value, [-1]) for value in (*votes, energy, *times, *lost)], 0)
        return tf.where(tf.math.is_finite(flat), flat, tf.zeros_like(flat))

    def _unpack(self, flat: tf.Tensor) -> dict[str, tf.Tensor]:
        sizes = [math.prod(shape) for shape in self._fields.values()]
        parts = tf.split(tf.ensure_shape(flat, [sum(sizes)]), sizes)
        return {name: tf.reshape(part, self._fields[name]) for name, part in zip(self._fields, parts)}


def _variable(value: tf.Tensor) -> tf.Variable:
    return tracing.variable(value, "hvdc_auto")
