"""What compression has saved in a recorded run."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import units
from .figures import link_of
from .run_log import Run


class Gained(NamedTuple):
    """What `auto` has gained over a fixed compressor, by its cost model."""

    compressor: str
    step: float  # milliseconds of a step, as last predicted
    progress: float  # of a step, relative to an uncompressed one
    per_progress: float  # milliseconds for the progress of an uncompressed step
    seconds: float  # by which training would have taken longer for the same progress; of the choice itself 0


def of_auto(run: Run) -> list[Gained]:
    """The choice, "auto", and each fixed compressor; empty if the run has no auto.csv.

    Each step counts with the predictions that were written next.
    """
    if "auto" not in run.auto:
        return []
    choice = run.auto["auto"]
    steps = np.maximum(np.diff(choice["step"], prepend=run.first.steps["step"][0] - 1), 0.0)
    made = steps * choice["progress"]
    gained = []
    for name, columns in run.auto.items():
        step, progress, per_progress = (columns[key] for key in ("step_ms", "progress", "ms_per_progress"))
        # The last rows may be missing.
        _, own, at = np.intersect1d(columns["step"], choice["step"], return_indices=True)
        if not len(own):
            continue
        seconds = float(made[at] @ (per_progress[own] - choice["ms_per_progress"][at])) / 1e3
        gained.append(Gained(name, float(step[-1]), float(progress[-1]), float(per_progress[-1]), seconds))
    return gained


def table(run: Run) -> list[list[str]]:
    """A header and a row per compressor of `of_auto`; empty without `auto`."""
    rows = [
        [one.compressor, f"{one.step:.3g}", f"{one.progress:.0%}", f"{one.per_progress:.3g}",
         "" if one.compressor == "auto" else f"{one.seconds:+.3g} s"]
        for one in of_auto(run)
    ]  # fmt: skip
    return [["predicted", "ms per step", "progress", "ms per progress", "gained by auto"], *rows] if rows else []


def _steps_per_exchange(run: Run) -> float:
    """With local steps, what was recorded are exchanges, of which each takes the place of those of some steps."""
    at = run.first.rounds.get("step", np.empty(0))
    return max((at[-1] - at[0] + run.local_steps) / run.num_steps, 1.0) if len(at) else 1.0


def sentences(run: Run) -> list[str]:
    """What compression has saved: bytes, seconds on the wire, and with `auto` seconds of training."""
    steps = run.first.steps
    known = np.isfinite(steps["bytes"]) & np.isfinite(steps["ratio"])
    sent = float(steps["bytes"][known].sum())
    plain = float((steps["bytes"] * steps["ratio"])[known].sum()) * _steps_per_exchange(run)
    lines = []
    if sent > 0.0 and plain > 1.05 * sent:
        lines.append(
            f"Rank {run.first.number} sent {units.show_bytes(sent)} in place of {units.show_bytes(plain)}, "
            f"{plain / sent:.3g} times less."
        )
        _, per_byte = link_of(run) if run.meta.get("link") else (0.0, 0.0)
        if per_byte > 0.0:
            # The median, not the sum: kernels are compiled in a few steps.
            coding = run.num_steps * float(np.median((steps["encode_ms"] + steps["decode_ms"])[known])) / 1e3
            lines.append(
                f"At the rate measured at the beginning, the bytes saved would have taken "
                f"{units.show_seconds((plain - sent) * per_byte / 1e3)} on the wire; encoding and decoding took "
                f"{units.show_seconds(coding)}."
            )
    elif sent > 0.0:
        saved = "compression saved next to nothing" if plain > sent else "nothing was compressed"
        lines.append(f"Rank {run.first.number} sent {units.show_bytes(sent)}: {saved}.")
    gained = {one.compressor: one.seconds for one in of_auto(run) if math.isfinite(one.seconds)}
    gained.pop("auto", None)
    if gained:
        best = min(gained, key=lambda name: (name == "fp16", gained[name]))  # fp16 is Horovod's, no candidate
        compared: dict[str, str] = {name: name for name in ("none", "fp16") if name in gained and name != best}
        compared[best] = f"the best fixed candidate, {best}"
        parts = [
            f"{units.show_seconds(abs(gained[name]))} {'less' if gained[name] >= 0.0 else 'more'} than with {title}"
            for name, title in compared.items()
        ]
        lines.append(f"By its cost model, auto took {', '.join(parts)}, for the same progress.")
    trials = int(run.trial.sum())
    if trials:
        lines.append(f"{trials} of {run.num_steps} steps were trials of candidates that were not chosen.")
    return lines
