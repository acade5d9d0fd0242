"""The report on the compression of each bucket, for users."""

from __future__ import annotations

import dataclasses
import math

from ..common.text_table import aligned

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
class StepForecast:
    """A training step in which all buckets of `auto` get the same compressor, by its cost model.

    Attributes:
        compressor: The spec string; "auto" for the choice in use.
        step: Seconds of the step: the exchange, with what the backward pass does not hide, and the rest.
        progress: The progress of the step, relative to an uncompressed one.
        per_progress: Seconds for the progress of an uncompressed step, which `auto` minimizes: the step's seconds
            divided by its progress, and up to `max_slowdown` more where energy is lost.
        tried: How many steps ago the compressor's steps were timed; None if they were not, or over 200 steps ago.
    """

    compressor: str
    step: float
    progress: float
    per_progress: float
    tried: int | None = None


@dataclasses.dataclass(frozen=True)
class AutoReport:
    """What `auto` chooses from, and what it has gained. The forecasts are those of now.

    Attributes:
        steps: The number of steps so far.
        choice: A step with the choice in use.
        fixed: A step with each candidate alone, and with `fp16` for comparison.
    """

    steps: int
    choice: StepForecast
    fixed: tuple[StepForecast, ...]

    @property
    def best_fixed(self) -> StepForecast:
        """The fixed compressor that takes the fewest seconds for the same progress."""
        return min(self.fixed, key=lambda forecast: forecast.per_progress)

    def gained(self, fixed: StepForecast) -> float:
        """The seconds by which training with `fixed` would have taken longer to make the same progress so far.

        All steps so far are taken to be like those of the choice in use.
        """
        return self.steps * self.choice.progress * (fixed.per_progress - self.choice.per_progress)

    def __str__(self) -> str:
        rows = [("", "ms per step", "progress", "ms per progress", "gained so far", "timed")]
        for forecast in (self.choice, *self.fixed):
            tried = "" if forecast.tried is None else f"{forecast.tried} steps ago"
            gained = "" if forecast is self.choice else f"{self.gained(forecast):+.3g} s"
            rows.append((
                forecast.compressor, f"{1e3 * forecast.step:.3g}", f"{forecast.progress:.0%}",
                f"{1e3 * forecast.per_progress:.3g}", gained, tried,
            ))  # fmt: skip
        title = f"auto after {self.steps} steps, predicted; its trials of two steps are no switches"
        return "\n".join([title, *(f"    {line}" for line in aligned(rows))])


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
        auto: What `auto` chooses from, the same for all of its buckets; None without `auto`.
    """

    nbytes: int
    chosen: str
    predicted: float | None = None
    measured: float | None = None
    switches: int = 0
    candidates: tuple[Candidate, ...] = ()
    rows_of: str = ""
    together: bool = False
    auto: AutoReport | None = None


@dataclasses.dataclass(frozen=True)
class RoundsReport:
    """The last exchange of local steps, on this rank. A movement is synchronized weights minus the rank's own.

    All but `statistics_drift` are 2-norms over the weights that were exchanged.

    Attributes:
        local_steps: Steps of a round.
        exchanges: The number of exchanges so far.
        step: The number of training steps when the last exchange ended.
        movement: Of this rank's movement.
        drift: Of this rank's movement minus the mean movement that it received. Without loss by compression, its root
            mean square over the ranks is the spread of the movements.
        outer_step: Of the change of the synchronized weights.
        weights: Of the synchronized weights before the exchange.
        statistics_drift: Like drift, of the moving statistics, as a share of their norm; NaN if there are none.
        lengths: What `auto` chooses `local_steps` from; empty if it does not.
        step_seconds: Of a step without its exchange, as `auto` has measured it; 0 before that.
        exchange_seconds: Of an exchange.
    """

    local_steps: int
    exchanges: int
    step: float
    movement: float
    drift: float
    outer_step: float
    weights: float
    statistics_drift: float
    lengths: tuple[int, ...] = ()
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0

    def __str__(self) -> str:
        moved = f"{self.movement:.3g}{_share(self.movement, self.weights, 'of their norm')}"
        drift = f"{self.drift:.3g}{_share(self.drift, self.movement, 'of it')}"
        text = (
            f"{self.exchanges} exchanges, local_steps={self.local_steps}; in the last one, after step {self.step:.0f}, "
            f"this rank's weights had moved by {moved}, {drift} away from the mean; the outer step was "
            f"{self.outer_step:.3g}"
        )
        if math.isfinite(self.statistics_drift):
            text += f"; moving statistics were {self.statistics_drift:.2%} away from their mean"
        if self.lengths:
            text += f"; auto chose local_steps={self.local_steps} from {', '.join(map(str, self.lengths))}"
        if self.exchange_seconds:
            text += (
                f": a step takes {milliseconds(self.step_seconds)}, an exchange {milliseconds(self.exchange_seconds)}"
            )
        return text


def _share(part: float, whole: float, of: str) -> str:
    return f" ({part / whole:.2%} {of})" if whole > 0.0 else ""


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """The compressor of each bucket; printable.

    Attributes:
        buckets: In the order of sending; rows of embeddings last.
        rounds: With local steps, the last exchange; None without, and before the first exchange.
    """

    buckets: tuple[BucketReport, ...]
    rounds: RoundsReport | None = None

    @property
    def auto(self) -> AutoReport | None:
        """What `auto` chooses from, and what it has gained; None without `auto`."""
        return next((bucket.auto for bucket in self.buckets if bucket.auto is not None), None)

    def __str__(self) -> str:
        lines = [str(part) for part in (self.auto, self.rounds) if part is not None]
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
