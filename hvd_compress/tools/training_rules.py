"""What can be wrong with how a run trains: rules about its loss and its residual. See `rules`."""

from __future__ import annotations

import numpy as np

from .figures import FEWEST, beginning, spread, windows
from .run_log import GUARD_COLUMNS, Run

# Of the first loss: how much it must jump, and how much lower it must be in the end for that not to matter.
_JUMP, _LOWER = 0.5, 0.2
# Peaks: of the first loss above the usual one, times the noise, how many.
_PEAK, _CLEAR, _PEAKS = 0.25, 8.0, 2


def loss_diverges(run: Run) -> str | None:
    """The loss is not finite, or rose far above what it had been."""
    loss = run.losses
    step = run.of_all("step")[0]
    known = ~np.isnan(loss)
    loss, step = loss[known], step[known]
    bad = ~np.isfinite(loss)
    if bad.any():
        return (
            f"the loss is not finite from step {step[bad][0]:.0f} on ({bad.sum()} of {len(loss)} steps); "
            f"{_before(loss)}"
        )
    lost = 1.0 - run.of_all("finite").min(0)
    if len(lost) >= FEWEST and lost[-len(lost) // 5 :].mean() > 0.5:
        return f"gradients are not finite in {lost.sum():.0f} of {len(lost)} steps, and in most of the last fifth"
    if len(loss) < FEWEST:
        return None
    level = windows(loss)
    first, best, last = beginning(loss), level.min(), level[-1]
    noise = spread(loss) / np.sqrt(len(loss) / len(level))
    rise, fall = last - best, max(first - best, 0.0)
    if rise > max(0.5 * fall, 6.0 * noise, 0.2 * abs(best)) and last > best:
        least = min(best, first)
        return f"the loss rises: {first:.4g} in the first steps, {least:.4g} at its best, {last:.4g} at the end"
    near = np.median(np.lib.stride_tricks.sliding_window_view(loss, 3), 1)
    peak, scale = near.max(), abs(first) + 1e-12
    if peak > first + max(_JUMP * scale, 6.0 * spread(loss)) and last > first - _LOWER * scale:
        return (
            f"the loss jumped from {first:.4g} to {peak:.4g} at step {step[near.argmax() + 1]:.0f}, and is hardly "
            f"lower in the end ({last:.4g})"
        )
    return None


def _before(loss: np.ndarray) -> str:
    """The loss before it was no number."""
    last = loss[: int(np.argmin(np.isfinite(loss)))]
    if not len(last):
        return "it never was"
    peak = float(last[-3:].max())
    rose = peak > 3.0 * abs(beginning(last)) + 1e-12
    return f"it had {'risen' if rose else 'not risen'} before ({beginning(last):.4g} at first, {peak:.4g} just before)"


def loss_oscillates(run: Run) -> str | None:
    """The loss goes up and down, or up again and again, and does not get lower."""
    loss = run.losses
    loss = loss[np.isfinite(loss)]
    if len(loss) < 2 * FEWEST:
        return None
    first, half = beginning(loss), loss[len(loss) // 2 :]
    swing, level = float(np.median(np.abs(np.diff(half)))), float(np.median(half))
    scale = abs(first) + 1e-12
    # Above that is divergence; below, it has got lower.
    if not first - 0.3 * scale < level <= 10.0 * scale:
        return None
    peaks = half > level + max(_PEAK * scale, _CLEAR * spread(half))
    count = int((np.diff(peaks.astype(int), prepend=0) == 1).sum())
    parts = windows(half)
    rises = float(np.maximum(np.diff(parts), 0.0).sum())
    error = spread(half) / np.sqrt(len(half) / len(parts))
    slow = rises > 0.3 * scale and rises > 10.0 * error and parts[-1] > parts[0] - 0.5 * rises
    if swing > 0.5 * scale or slow:
        return (
            f"the loss goes up and down in the second half: by {swing:.3g} from step to step around {level:.4g}, "
            f"having begun at {first:.4g}"
        )
    if count >= _PEAKS:
        return (
            f"the loss leaps up {count} times in the second half, to {half.max():.4g}, from {level:.4g}, having "
            f"begun at {first:.4g}"
        )
    return None


def guard_acted(run: Run) -> str | None:
    """`CompressionGuard` changed the compressors."""
    if not len(run.guard.get("step", ())):
        return None
    first = {name: values[0] for name, values in run.guard.items()}
    count, (step, compressor, reason) = len(run.guard["step"]), (first[name] for name in GUARD_COLUMNS)
    text = f"CompressionGuard changed to {compressor} after step {step:.0f}: {reason}"
    last = run.guard["compressor"][-1]
    return text if count == 1 else f"{text}; it made {count} changes, the last one to {last}"


def residual_grows(run: Run) -> str | None:
    """The residual is many gradients large and still grows."""
    residual, gradient = run.of_all("residual_norm"), run.of_all("gradient_norm")
    known = ~(np.isnan(residual) | np.isnan(gradient)).any(0) & (gradient > 0.0).all(0)
    if known.sum() < 12 or not (residual[:, known] > 0.0).any():
        return None
    step = run.of_all("step")[0]
    third = (3.0 * (step - step[0]) / (step[-1] - step[0] + 1.0)).astype(int)[known]
    if (third == 1).sum() < 2 or (third == 2).sum() < 2:
        return None
    # A gradient counts as at least the median one: gradients that vanish at the end of training leave some residual.
    usual = np.median(gradient[:, known], 1, keepdims=True)
    ratios = (residual[:, known] / np.maximum(gradient[:, known], usual)).max(0)
    middle, end = np.median(ratios[third == 1]), np.median(ratios[third == 2])
    if end < 8.0 or end < 1.15 * middle:
        return None
    last = residual[:, ~np.isnan(residual).any(0)][:, -1].max()
    return (
        f"the residual is {end:.3g} times as large as a step's gradient in the last third of the run, "
        f"{middle:.3g} times in the middle third, and grows (its norm is {last:.4g} at the end)"
    )
