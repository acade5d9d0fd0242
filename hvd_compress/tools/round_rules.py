"""What can be wrong with the rounds of local steps: rules about drift and the outer step. See `rules`."""

from __future__ import annotations

import numpy as np

from .run_log import Run

# The exchanges that a rule needs in each third of a run.
_FEWEST = 5
# Ranks drift apart if drift has grown so many times since the first third, and since the middle one.
_GROWN, _STILL = 2.0, 1.3
# The outer step is too long if it is so many times as long as a rank's movement. With the values of DiLoCo (lr=0.7,
# momentum=0.9), it is at most 7 times as long. In trainings of the tests' network with lr from 0.7 to 12, the loss was
# higher only with 12 (21 times as long), and not with 6 (11 times).
_LONG = 15.0
# The spread of the moving statistics that matters, as a share of their norm.
_STATISTICS = 0.05


def _thirds(run: Run, column: str) -> list[np.ndarray] | None:
    """The known values of a column of the rounds, behind the warm-up, in three parts; None if there are too few."""
    rounds = run.rounds
    if not len(rounds.get("step", ())):
        return None
    warm_up = run.settings.get("local_warmup")
    compared = rounds["step"] > (warm_up if type(warm_up) is int else 0)
    if not _streams(run):  # `auto` may begin with shorter rounds, and the end of a fit ends one
        length = _length(run)
        compared &= np.diff(rounds["step"], prepend=rounds["step"][0] - length) == length
    values = rounds[column][compared]
    parts = np.array_split(values[np.isfinite(values)], 3)
    return parts if len(parts[-1]) >= _FEWEST else None


def _streams(run: Run) -> bool:
    return run.settings.get("fragments") == "stream"


def _length(run: Run) -> int:
    """The steps of a round at the end of the run."""
    lengths = np.diff(run.rounds.get("step", np.empty(0)))
    return run.local_steps if _streams(run) or not len(lengths) else int(np.median(lengths[-(len(lengths) // 3) :]))


def drift_grows(run: Run) -> str | None:
    """The movements of the ranks differ more and more."""
    thirds = _thirds(run, "drift")
    if thirds is None:
        return None
    first, middle, last = (float(np.median(part)) for part in thirds)
    if not last > 0.0 or last < _GROWN * first or last < _STILL * middle:
        return None
    movements = _thirds(run, "movement")
    share = "" if movements is None else f", {last / np.median(movements[-1]):.0%} of a rank's movement"
    return (
        f"the drift between ranks (root mean square of their distances from the mean movement) has grown from "
        f"{first:.3g} in the first third of the run to {middle:.3g} and {last:.3g} in the last one{share}; rounds have "
        f"{_length(run)} steps"
    )


def outer_step_too_long(run: Run) -> str | None:
    """The synchronized weights move many times as far as the ranks' own."""
    outer, movements = _thirds(run, "outer_step"), _thirds(run, "movement")
    if outer is None or movements is None:
        return None
    # In the last two thirds: where the learning rate falls, outer momentum stays large for some rounds.
    pairs = [(float(np.median(a)), float(np.median(b))) for a, b in zip(outer[1:], movements[1:])]
    if not all(step >= _LONG * movement > 0.0 for step, movement in pairs):
        return None
    step, movement = pairs[-1]
    return (
        f"an outer step is {step / movement:.3g} times as long as a rank's movement in a round ({step:.3g} and "
        f"{movement:.3g}, medians of the last third of the run); outer is {run.settings.get('outer')}"
    )


def statistics_differ(run: Run) -> str | None:
    """The moving statistics of batch normalization differ much between ranks at the end of rounds."""
    thirds = _thirds(run, "statistics_drift")
    if thirds is None:
        return None
    spread = float(np.median(thirds[-1]))
    if spread < _STATISTICS:
        return None
    return (
        f"at the end of a round of {_length(run)} steps, the moving statistics of batch normalization are "
        f"{spread:.0%} of their norm away from their mean over the ranks (median of the last third of the run)"
    )
