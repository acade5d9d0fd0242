"""Turns recorded rows into times, bytes and errors of each step and bucket. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .recorder import COLUMNS, HEADER, WatchedBucket

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Measurements of B buckets in T steps, each [T, B]; times in seconds.

    Attributes:
        compressor: Index of the compressor among the bucket's compressors, int.
        bytes: Bytes that this rank sent.
        uncompressed_bytes: Bytes that it would send without compression.
        encode: Time of encoding. It starts when the bucket's gradients are ready and the previous bucket is encoded.
        wire: Time of the exchange. It starts when the bucket is encoded and the buckets sent before have arrived, and
            ends when the payloads of the other ranks have arrived.
        decode: Time of decoding, from then on.
        error: Relative error ||x - C(x)|| / ||x||, where x = gradient + residual; NaN if not measured.
        gradient_norm: Norm of the gradient.
        norm: Norm of x.
        residual_norm: Norm of the residual after the step.
    """

    compressor: Array
    bytes: Array
    uncompressed_bytes: Array
    encode: Array
    wire: Array
    decode: Array
    error: Array
    gradient_norm: Array
    norm: Array
    residual_norm: Array


@dataclasses.dataclass(frozen=True)
class Steps:
    """Measurements of T steps, each [T]; times in seconds.

    Attributes:
        step: Number of the step, from 1 on.
        loss: Loss of the step's batch; infinite if it is not a number, NaN if unknown.
        seconds: Time since the end of the previous step; NaN for the first one.
        exchange: Time during which at least one bucket was encoded, exchanged or decoded.
        exposed: The part of it after the last gradient was ready, for which training waits.
        finite: Whether all gradients of all ranks were finite.
        done: When the last bucket was decoded, in seconds since 1970.
        buckets: Measurements of the buckets.
    """

    step: Array
    loss: Array
    seconds: Array
    exchange: Array
    exposed: Array
    finite: Array
    done: Array
    buckets: Buckets

    def __len__(self) -> int:
        return len(self.step)

    @property
    def encode(self) -> Array:
        """Time of encoding, summed over the buckets."""
        return self.buckets.encode.sum(1)

    @property
    def wire(self) -> Array:
        """Time of the exchange, summed over the buckets."""
        return self.buckets.wire.sum(1)

    @property
    def decode(self) -> Array:
        """Time of decoding, summed over the buckets."""
        return self.buckets.decode.sum(1)

    @property
    def bytes(self) -> Array:
        """Bytes sent, summed over the buckets."""
        return self.buckets.bytes.sum(1)

    @property
    def ratio(self) -> Array:
        """Bytes without compression, divided by the bytes sent."""
        return _divided(self.buckets.uncompressed_bytes.sum(1), self.bytes)

    @property
    def residual_norm(self) -> Array:
        """Norm of the residuals of all buckets."""
        return np.sqrt((self.buckets.residual_norm**2).sum(1))

    @property
    def gradient_norm(self) -> Array:
        """Norm of the gradients of the compressed buckets."""
        return np.sqrt(_known_sum(self.buckets.gradient_norm**2))

    @property
    def error(self) -> Array:
        """Relative error of the compressed buckets together."""
        b = self.buckets
        total = _known_sum(b.norm**2)
        relative = np.sqrt(_divided(_known_sum((b.error * b.norm) ** 2), total))
        lossless = np.isnan(b.norm).all(1) & (b.error == 0.0).all(1)
        return np.where(lossless, 0.0, np.where(total > 0.0, relative, np.where(np.isnan(total), np.nan, 0.0)))


class Reader:
    """Turns rows into steps, one call after the other: each step is measured relative to the previous one."""

    def __init__(self, buckets: Sequence[WatchedBucket]) -> None:
        self._sent = [np.array(bucket.sent, np.float64) for bucket in buckets]
        self._uncompressed_bytes = np.array([bucket.plain for bucket in buckets], np.float64)
        self.pause()
        self._loss = (0.0, 0.0)

    def pause(self) -> None:
        """The time until the next step does not count as a part of it (validation, or another epoch)."""
        self._last = np.nan

    def new_epoch(self) -> None:
        """Keras's running mean of the loss starts again."""
        self._loss = (0.0, 0.0)
        self.pause()

    def steps(self, rows: Array) -> Steps:
        """The steps of rows, float64 [T, width], as returned by `Recorder.read`."""
        count = len(self._uncompressed_bytes)
        head = dict(zip(HEADER, rows[:, : len(HEADER)].T))
        cells = rows[:, len(HEADER) :].reshape(len(rows), count, len(COLUMNS))
        columns = {name: cells[:, :, i] for i, name in enumerate(COLUMNS)}
        finite = head["committed"] == 1.0
        buckets = self._buckets(columns, finite)
        done = columns["decoded"].max(1) if count else head["ready"]
        previous = np.concatenate([[self._last], done[:-1]])
        if len(done):
            self._last = done[-1]
        return Steps(
            head["step"].astype(np.int64) + 1,
            self._losses(head["loss_total"], head["loss_count"]),
            done - previous,
            _union(columns["ready"], columns["decoded"]),
            np.maximum(done - head["ready"], 0.0),
            finite,
            done,
            buckets,
        )

    def _buckets(self, columns: dict[str, Array], finite: Array) -> Buckets:
        choice = columns["choice"].astype(np.int64)
        bytes_sent = np.zeros(choice.shape)
        for b, table in enumerate(self._sent):
            bytes_sent[:, b] = table[choice[:, b]]
        order = np.argsort(columns["encoded"], axis=1, kind="stable")
        received = np.take_along_axis(columns["received"], order, 1)
        starts = np.take_along_axis(columns["encoded"], order, 1)
        wire_free = np.maximum.accumulate(received, axis=1)
        starts[:, 1:] = np.maximum(starts[:, 1:], wire_free[:, :-1])
        wire = np.empty_like(starts)
        np.put_along_axis(wire, order, np.maximum(received - starts, 0.0), 1)
        lost, norm = columns["lost_norm"], columns["norm"]
        error = np.where(lost == 0.0, 0.0, _divided(lost, norm))
        return Buckets(
            choice,
            _or_default(columns["sent_bytes"], bytes_sent),
            _or_default(columns["plain_bytes"], np.broadcast_to(self._uncompressed_bytes, choice.shape)),
            np.maximum(columns["encoded"] - columns["ready"], 0.0),
            wire,
            np.maximum(columns["decoded"] - columns["received"], 0.0),
            np.where(finite[:, None], error, np.nan),
            columns["gradient_norm"],
            norm,
            np.where(finite[:, None], columns["residual_norm"], np.nan),
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


def _or_default(measured: Array, default: Array) -> Array:
    """The measured values; the default where they are NaN."""
    return np.where(np.isnan(measured), default, measured)


def _divided(a: Array, b: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(b != 0.0, a / b, np.nan))


def _known_sum(values: Array) -> Array:
    """The sum over the buckets, [T, B] to [T], without NaN values; NaN if all are NaN."""
    return np.where(np.isnan(values).all(1), np.nan, np.nansum(values, 1))


def _union(begin: Array, end: Array) -> Array:
    """The length of the union of the B intervals of each step, [T, B] to [T]."""
    if begin.shape[1] == 0:
        return np.zeros(len(begin))
    order = np.argsort(begin, axis=1)
    begin, end = np.take_along_axis(begin, order, 1), np.take_along_axis(end, order, 1)
    covered = np.maximum.accumulate(end, axis=1)
    begin[:, 1:] = np.maximum(begin[:, 1:], covered[:, :-1])
    return np.maximum(end - begin, 0.0).sum(1)
