"""Turns recorded rows into times, bytes and errors of each step and bucket. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..formats.auto import TRIAL_STEPS
from .recorder import COLUMNS, HEADER, TIMES, WatchedBucket
from .trials import trial_steps

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Measurements of B buckets in T steps, each [T, B]; times in seconds."""

    compressor: Array  # index of the compressor among the bucket's compressors, int
    bytes: Array  # bytes that this rank sent
    uncompressed_bytes: Array  # bytes that it would send without compression
    encode: Array  # begins when the bucket's gradients are ready and the previous bucket is encoded
    # Begins when the bucket is encoded and the buckets sent before have arrived, and ends when the payloads of the
    # other ranks have arrived.
    wire: Array
    decode: Array  # from then on
    error: Array  # relative error ||x - C(x)|| / ||x||, where x = gradient + residual; NaN if not measured
    gradient_norm: Array
    norm: Array  # of x
    residual_norm: Array  # after the step
    times: Array  # [T, B, 4]: when it was ready, encoded, received and decoded, in seconds since 1970


@dataclasses.dataclass(frozen=True)
class Steps:
    """Measurements of T steps, each [T]; times in seconds."""

    step: Array  # number of the step, from 1 on
    loss: Array  # of the step's batch; infinite if it is not a number, NaN if unknown
    seconds: Array  # since the end of the previous step; NaN for the first one
    exchange: Array  # time during which at least one bucket was encoded, exchanged or decoded
    exposed: Array  # the part of it after the last gradient was ready, for which training waits
    finite: Array  # whether all gradients of all ranks were finite
    done: Array  # when the last bucket was decoded, in seconds since 1970
    buckets: Buckets
    # The next four are sums over the buckets.
    encode: Array
    wire: Array
    decode: Array
    bytes: Array
    ratio: Array  # bytes without compression, divided by the bytes sent
    gradient_norm: Array  # of the compressed buckets together, as the error
    residual_norm: Array
    error: Array
    trial: Array  # bool: whether `auto` tried a candidate that it has not chosen

    def __len__(self) -> int:
        return len(self.step)


class Reader:
    """Turns rows into steps, one call after the other: each step is measured relative to the previous one.

    `of_auto` are the positions of the buckets of `auto`.
    """

    def __init__(self, buckets: Sequence[WatchedBucket], of_auto: Sequence[int] = ()) -> None:
        self._of_auto = list(of_auto)
        self._choice: Array | None = None  # of `auto`, in the last step that was no trial
        self._tried = np.zeros([0, len(of_auto)])  # the choices of the last steps, if these were trials
        self._sent = [np.array(bucket.sent, np.float64) for bucket in buckets]
        self._uncompressed_bytes = np.array([bucket.plain for bucket in buckets], np.float64)
        self.new_epoch()

    def new_epoch(self) -> None:
        """Keras's running mean of the loss starts again, and the time until the next step is not a part of it."""
        self._last_done = np.nan
        self._loss = (0.0, 0.0)

    def steps(self, rows: Array) -> Steps:
        """The steps of rows, float64 [T, width], as returned by `Recorder.read`."""
        count = len(self._uncompressed_bytes)
        head = dict(zip(HEADER, rows[:, : len(HEADER)].T))
        cells = rows[:, len(HEADER) :].reshape(len(rows), count, len(COLUMNS))
        columns = {name: cells[:, :, i] for i, name in enumerate(COLUMNS)}
        finite = head["committed"] == 1.0
        buckets = self._buckets(columns, finite)
        done = columns["decoded"].max(1) if count else head["ready"]
        previous = np.concatenate([[self._last_done], done[:-1]])
        if len(done):
            self._last_done = done[-1]
        return Steps(
            head["step"].astype(np.int64) + 1,
            self._losses(head["loss_total"], head["loss_count"]),
            done - previous,
            _union(columns["ready"], columns["decoded"]),
            np.maximum(done - head["ready"], 0.0),
            finite,
            done,
            buckets,
            encode=buckets.encode.sum(1),
            wire=buckets.wire.sum(1),
            decode=buckets.decode.sum(1),
            bytes=buckets.bytes.sum(1),
            ratio=_divided(buckets.uncompressed_bytes.sum(1), buckets.bytes.sum(1)),
            gradient_norm=np.sqrt(_known_sum(buckets.gradient_norm**2)),
            residual_norm=np.sqrt((buckets.residual_norm**2).sum(1)),
            error=_error(buckets),
            trial=self._trials(buckets.compressor),
        )

    def _trials(self, compressor: Array) -> Array:
        choices = compressor[:, self._of_auto]
        if not choices.size:
            return np.zeros(len(choices), bool)
        # A few steps may be read at a time: whether they are trials depends on those before.
        known = np.concatenate([self._tried, choices])
        trials = trial_steps(known, known[0] if self._choice is None else self._choice)
        if not trials.all():
            self._choice = known[~trials][-1]
        self._tried = known[np.flatnonzero(~trials)[-1] + 1 :] if not trials.all() else known
        self._tried = self._tried[-TRIAL_STEPS:]
        return trials[-len(choices) :]

    def _buckets(self, columns: dict[str, Array], finite: Array) -> Buckets:
        choice = columns["choice"].astype(np.int64)
        bytes_sent = np.zeros(choice.shape)
        for b, table in enumerate(self._sent):
            bytes_sent[:, b] = table[choice[:, b]]
        order = np.argsort(columns["encoded"], axis=1, kind="stable")
        received = np.take_along_axis(columns["received"], order, 1)
        starts = _after_earlier(np.take_along_axis(columns["encoded"], order, 1), received)
        wire = np.empty_like(starts)
        np.put_along_axis(wire, order, np.maximum(received - starts, 0.0), 1)
        lost, norm = columns["lost_norm"], columns["norm"]
        error = np.where(lost == 0.0, 0.0, _divided(lost, norm))
        return Buckets(
            choice,
            _or_default(columns["sent_bytes"], bytes_sent),
            _or_default(columns["plain_bytes"], self._uncompressed_bytes),
            np.maximum(columns["encoded"] - columns["ready"], 0.0),
            wire,
            np.maximum(columns["decoded"] - columns["received"], 0.0),
            np.where(finite[:, None], error, np.nan),
            columns["gradient_norm"],
            norm,
            np.where(finite[:, None], columns["residual_norm"], np.nan),
            np.stack([columns[name] for name in TIMES], 2),
        )

    def _losses(self, total: Array, count: Array) -> Array:
        """The loss of each step, from the running sum and weight, which start again with each epoch."""
        running = np.stack([total, count])
        previous = np.concatenate([np.array(self._loss)[:, None], running[:, :-1]], 1)
        previous = np.where(count < previous[1], 0.0, previous)
        weight = count - previous[1]
        if len(total):
            self._loss = (float(total[-1]), float(count[-1]))
        with np.errstate(invalid="ignore"):  # infinity - infinity
            loss = _divided(total - previous[0], weight)
        return np.where(weight > 0.0, np.where(np.isnan(loss), np.inf, loss), np.nan)


def _error(b: Buckets) -> Array:
    """The relative error of the compressed buckets together, [T]."""
    total = _known_sum(b.norm**2)
    relative = np.sqrt(_divided(_known_sum((b.error * b.norm) ** 2), total))
    lossless = np.isnan(b.norm).all(1) & (b.error == 0.0).all(1)
    return np.where(lossless, 0.0, np.where(total > 0.0, relative, np.where(np.isnan(total), np.nan, 0.0)))


def _or_default(measured: Array, default: Array) -> Array:
    """The measured values; the default where they are NaN."""
    return np.where(np.isnan(measured), default, measured)


def _divided(a: Array, b: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(b != 0.0, a / b, np.nan))


def _known_sum(values: Array) -> Array:
    """The sum over the buckets, [T, B] to [T], without NaN values; NaN if all are NaN."""
    return np.where(np.isnan(values).all(1), np.nan, np.nansum(values, 1))


def _after_earlier(begin: Array, end: Array) -> Array:
    """The begins of intervals, [T, B], but none before the ends of all intervals to the left."""
    latest = np.maximum.accumulate(end, axis=1)
    return np.concatenate([begin[:, :1], np.maximum(begin[:, 1:], latest[:, :-1])], 1)


def _union(begin: Array, end: Array) -> Array:
    """The length of the union of the B intervals of each step, [T, B] to [T]."""
    order = np.argsort(begin, axis=1)
    begin, end = np.take_along_axis(begin, order, 1), np.take_along_axis(end, order, 1)
    return np.maximum(end - _after_earlier(begin, end), 0.0).sum(1)
