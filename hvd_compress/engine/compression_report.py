"""The report on the compression of each bucket, for users."""

from __future__ import annotations

import dataclasses

# Follows the times of a model-wide candidate.
OF_ALL = " for all buckets at once"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One compressor for one bucket.

    Attributes:
        compressor: The spec string.
        predicted: Seconds of the bucket's exchange; for `powersgd`, seconds of the exchange of all buckets at once.
        through: The share of the gradients' energy that it lets through.
        progress: The progress of a step, relative to an uncompressed one.
        why: The reason why it was not chosen; empty for the chosen one.
    """

    compressor: str
    predicted: float
    through: float
    progress: float
    why: str


@dataclasses.dataclass(frozen=True)
class BucketReport:
    """One bucket.

    Attributes:
        nbytes: Bytes of its gradients, as float32.
        chosen: The spec string of the compressor in use.
        predicted: Seconds of its exchange; None without `auto`.
        measured: Seconds, a running average; None before the first measurement.
        switches: How often the choice changed.
        candidates: All compressors that the bucket may get.
        rows_of: For an embedding whose rows are exchanged, the variable's path; else empty.
        together: Whether all buckets of `auto` are exchanged at once: times are those of all of them.
    """

    nbytes: int
    chosen: str
    predicted: float | None = None
    measured: float | None = None
    switches: int = 0
    candidates: tuple[Candidate, ...] = ()
    rows_of: str = ""
    together: bool = False


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """The compressor of each bucket; printable.

    Attributes:
        buckets: In the order of sending; rows of embeddings last.
    """

    buckets: tuple[BucketReport, ...]

    def __str__(self) -> str:
        lines = []
        for i, bucket in enumerate(self.buckets):
            name = f"rows of {bucket.rows_of}" if bucket.rows_of else f"bucket {i}"
            line = f"{name} ({bucket.nbytes / 1e6:.1f} MB): {bucket.chosen}"
            if bucket.candidates:
                line += f"; predicted {milliseconds(bucket.predicted)}, measured {milliseconds(bucket.measured)}"
                line += f"{OF_ALL if bucket.together else ''}; {bucket.switches} switches"
            lines.append(line)
            lines += [
                f"    not {candidate.compressor}: {candidate.why}" for candidate in bucket.candidates if candidate.why
            ]
        return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    """Seconds as text in milliseconds; "not yet" for None."""
    return "not yet" if seconds is None else f"{1e3 * seconds:.3g} ms"
