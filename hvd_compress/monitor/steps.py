"""What the recorded rows say: times, bytes and errors of each step and bucket. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .recorder import COLUMNS, HEADER, WatchedBucket

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The buckets of T steps, [T, B] each; times in seconds.

    Attributes:
        compressor: int, which of the bucket's compressors.
        bytes: Sent by this rank.
        plain: That it would send uncompressed.
        encode: From when its gradients are there and the bucket before is encoded.
        wire: From then, and from when the buckets before have arrived, until the other ranks' payloads are there.
        decode: From then on.
        error: ||x - C(x)|| / ||x|| of x = gradient + residual; NaN where not taken.
        gradient_norm, norm, residual_norm: Of the gradient, x, and the residual that the step left.
    """

    compressor: Array
    bytes: Array
    plain: Array
    encode: Array
    wire: Array
    decode: Array
    error: Array
    gradient_norm: Array
    norm: Array
    residual_norm: Array


@dataclasses.dataclass(frozen=True)
class Steps:
    """T steps, [T] each; times in seconds.

    Attributes:
        step: From 1 on.
        loss: Of the step's own batch; infinite where it is not a number, NaN where not known.
        seconds: From the end of the step before; NaN in the first one.
        exchange: In which any bucket was encoded, on its way, or decoded.
        exposed: Of it, after the last gradient was there: what training waits for.
        finite: Whether all gradients of all ranks were.
        done: When the last bucket was decoded, since the epoch (1970).
        buckets: What else is summed up over them.
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
        """Of all buckets."""
        return self.buckets.encode.sum(1)

    @property
    def wire(self) -> Array:
        """Of all buckets; they are counted one after the other."""
        return self.buckets.wire.sum(1)

    @property
    def decode(self) -> Array:
        """Of all buckets."""
        return self.buckets.decode.sum(1)

    @property
    def bytes(self) -> Array:
        """Of all buckets."""
        return self.buckets.bytes.sum(1)

    @property
    def ratio(self) -> Array:
        """Bytes without compression, over those with it."""
        return _divided(self.buckets.plain.sum(1), self.bytes)

    @property
    def residual_norm(self) -> Array:
        """Of all buckets."""
        return np.sqrt((self.buckets.residual_norm**2).sum(1))

    @property
    def gradient_norm(self) -> Array:
        """Of the compressed buckets."""
        return np.sqrt(_known_sum(self.buckets.gradient_norm**2))

    @property
    def error(self) -> Array:
        """Of the compressed buckets, together."""
        b = self.buckets
        total = _known_sum(b.norm**2)
        lost = np.sqrt(_divided(_known_sum((b.error * b.norm) ** 2), total))
        whole = np.isnan(b.norm).all(1) & (b.error == 0.0).all(1)
        return np.where(whole, 0.0, np.where(total > 0.0, lost, np.where(np.isnan(total), np.nan, 0.0)))


class Reader:
    """Makes steps of rows; keeps what the next ones refer to."""

    def __init__(self, buckets: Sequence[WatchedBucket]) -> None:
        self._sent = [np.array(bucket.sent, np.float64) for bucket in buckets]
        self._plain = np.array([bucket.plain for bucket in buckets], np.float64)
        self.pause()
        self._loss = (0.0, 0.0)

    def pause(self) -> None:
        """What comes between the last step and the next one is no part of it (validation, another epoch)."""
        self._last = np.nan

    def new_epoch(self) -> None:
        """The metric of the loss begins anew."""
        self._loss = (0.0, 0.0)
        self.pause()

    def steps(self, rows: Array) -> Steps:
        """The steps of rows, float64 [T, width], as a `Recorder` reads them."""
        count = len(self._plain)
        head = dict(zip(HEADER, rows[:, : len(HEADER)].T))
        cells = rows[:, len(HEADER) :].reshape(len(rows), count, len(COLUMNS))
        found = {name: cells[:, :, i] for i, name in enumerate(COLUMNS)}
        finite = head["committed"] == 1.0
        buckets = self._buckets(found, finite)
        done = found["done"].max(1) if count else head["ready"]
        before = np.concatenate([[self._last], done[:-1]])
        if len(done):
            self._last = done[-1]
        return Steps(
            head["step"].astype(np.int64) + 1,
            self._losses(head["loss_total"], head["loss_count"]),
            done - before,
            _union(found["begun"], found["done"]),
            np.maximum(done - head["ready"], 0.0),
            finite,
            done,
            buckets,
        )

    def _buckets(self, found: dict[str, Array], finite: Array) -> Buckets:
        choice = found["choice"].astype(np.int64)
        sent = np.zeros(choice.shape)
        for b, table in enumerate(self._sent):
            sent[:, b] = table[choice[:, b]]
        order = np.argsort(found["sent"], axis=1, kind="stable")
        arrived = np.take_along_axis(found["arrived"], order, 1)
        begins = np.take_along_axis(found["sent"], order, 1)
        free = np.maximum.accumulate(arrived, axis=1)
        begins[:, 1:] = np.maximum(begins[:, 1:], free[:, :-1])
        wire = np.empty_like(begins)
        np.put_along_axis(wire, order, np.maximum(arrived - begins, 0.0), 1)
        lost, norm = found["lost_norm"], found["norm"]
        error = np.where(lost == 0.0, 0.0, _divided(lost, norm))
        return Buckets(
            choice,
            _or_known(found["sent_bytes"], sent),
            _or_known(found["plain_bytes"], np.broadcast_to(self._plain, sent.shape)),
            np.maximum(found["sent"] - found["begun"], 0.0),
            wire,
            np.maximum(found["done"] - found["arrived"], 0.0),
            np.where(finite[:, None], error, np.nan),
            found["gradient_norm"],
            norm,
            np.where(finite[:, None], found["residual_norm"], np.nan),
        )

    def _losses(self, total: Array, count: Array) -> Array:
        """Each step's own, of the running sum and weight, which begin anew with an epoch."""
        before, weight = np.stack([total, count]), np.empty_like(count)
        before = np.concatenate([np.array(self._loss)[:, None], before[:, :-1]], 1)
        before = np.where(count < before[1], 0.0, before)
        weight = count - before[1]
        if len(total):
            self._loss = (float(total[-1]), float(count[-1]))
        with np.errstate(invalid="ignore"):  # infinite before, and still
            loss = _divided(total - before[0], weight)
        return np.where(weight > 0.0, np.where(np.isnan(loss), np.inf, loss), np.nan)


def _or_known(measured: Array, known: Array) -> Array:
    """What was measured; what is `known` of each step where nothing was."""
    return np.where(np.isnan(measured), known, measured)


def _divided(a: Array, b: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(b != 0.0, a / b, np.nan))


def _known_sum(values: Array) -> Array:
    """Over the buckets of which it is known, [T]; NaN where of none."""
    return np.where(np.isnan(values).all(1), np.nan, np.nansum(values, 1))


def _union(begin: Array, end: Array) -> Array:
    """The time that intervals [T, B] cover, [T]."""
    if begin.shape[1] == 0:
        return np.zeros(len(begin))
    order = np.argsort(begin, axis=1)
    begin, end = np.take_along_axis(begin, order, 1), np.take_along_axis(end, order, 1)
    covered = np.maximum.accumulate(end, axis=1)
    begin[:, 1:] = np.maximum(begin[:, 1:], covered[:, :-1])
    return np.maximum(end - begin, 0.0).sum(1)
