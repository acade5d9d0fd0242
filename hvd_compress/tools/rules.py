"""What can be wrong with a run: one rule per fault, a function that returns what it saw in a run, or None.

Rules compare a run with itself (its beginning with its end, ranks and buckets with each other, times with the step),
so that they hold for any model and machine. Times are medians or means over many steps, without the first ones, in
which functions are compiled. A rule returns None if a run is too short to judge.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .. import formats
from ..auto.usual_progress import usual
from ..formats import Format
from ..formats.auto import TRIAL_STEPS
from .figures import ENOUGH, FEWEST, WARM_UP, late, link_of, median, rate, trimmed
from .prediction import expected_progress
from .round_rules import drift_grows, outer_step_too_long, statistics_differ
from .run_log import Run
from .training_rules import guard_acted, loss_diverges, loss_oscillates, residual_grows

# Communication dominates if it exposes this share of a step, or if the wire takes the other one in nine of ten steps;
# below so many milliseconds it does not matter.
_EXPOSED, _ON_WIRE, _EXPOSED_MS = 0.4, 0.5, 20.0
# A link's latency that counts by itself, milliseconds.
_FAR_MS = 30.0
# Compression costs more than it saves if it costs this share of a step, and so many milliseconds.
_LOST, _LOST_MS = 0.15, 3.0
# A rank is slow if it is this share of a step behind; in most of the parts of the run.
_BEHIND, _PARTS, _MOST = 0.2, 8, 0.75
# `auto` switches to and fro if it goes back at least so often, and once in so many steps.
_RETURNS, _STEPS = 2, 500
# A milder compressor is worth a change if it takes this share of the time for the same progress.
_WORTH = 0.8
_MILD = ("int8", "int4", "int2", "hadamard")
_ELEMENTS = 2**20  # of a tensor that shows how many bytes they send
_LEAST_PROGRESS = 0.02
_SMALL_BUCKET = 128 * 1024  # bytes; the default of bucket_bytes makes none of these


class Rule(NamedTuple):
    """A fault."""

    name: str  # what it is called
    check: Callable[[Run], str | None]  # what shows the fault, with the figures, in one line; None if there is none
    advice: str  # what to change


def communication_dominates(run: Run) -> str | None:
    """Much of a step is waiting for the exchange: for bytes, or for a link of high latency."""
    step, exposed = late(run.fastest("step_ms")), late(run.fastest("exposed_ms"))
    if step is None or exposed is None:
        return None
    total, wait = float(np.median(step)), float(np.median(exposed))
    if wait < _EXPOSED * total or wait < _EXPOSED_MS:
        return None
    latency, per_byte = link_of(run)
    wire, sent = median(run, "wire_ms"), median(run, "bytes")
    # What nine of ten steps wait for on the wire is due to the link; delays by a busy processor come and go.
    # It is over 80% of a step on emulated links, and under 40% on one loaded machine without them.
    on_wire = late(np.minimum(run.fastest("exposed_ms"), run.fastest("wire_ms")))
    steady = 0.0 if on_wire is None else float(np.percentile(on_wire, 10))
    is_measured = sent * per_byte >= 0.25 * total or latency >= _FAR_MS
    if not is_measured and steady < max(_ON_WIRE * total, _EXPOSED_MS):
        return None
    per_byte = max(per_byte, steady / max(sent, 1.0))
    return (
        f"of a step's {total:.1f} ms, {wait:.1f} ms ({wait / total:.0%}) are spent waiting for the exchange after "
        f"the last gradient is there; {wire:.1f} ms are on the wire; each rank sends {sent / 1e6:.3g} MB per step, "
        f"compressed {median(run, 'ratio'):.1f} times, {rate(per_byte)}"
    )


def compression_costs(run: Run) -> str | None:
    """Encoding and decoding take longer than the bytes that they save would, and steps wait for it."""
    _, per_byte = link_of(run)
    # Buckets may be encoded side by side.
    cost = min(median(run, "encode_ms") + median(run, "decode_ms"), median(run, "exchange_ms"))
    step, exposed = median(run, "step_ms"), median(run, "exposed_ms")
    sent, ratio = median(run, "bytes"), median(run, "ratio")
    if not ratio > 1.05 or run.num_steps < ENOUGH:
        return None
    saved = (ratio - 1.0) * sent * per_byte
    # What the backward pass hides costs nothing.
    lost = min(cost - saved, exposed)
    if cost < 1.25 * saved or lost < max(_LOST * step, _LOST_MS):
        return None
    return (
        f"encoding and decoding take {cost:.1f} ms of a step's {step:.1f} ms, and save about {saved:.1f} ms on the "
        f"wire: {(ratio - 1.0) * sent / 1e6:.3g} MB less {rate(per_byte)}"
    )


def loses_progress(run: Run) -> str | None:
    """A fixed compressor leaves so much to later steps that a milder one would make more progress per second.

    The time of the milder one is an upper bound: nothing of what it sends more is hidden, and it encodes twice as long.
    """
    spec, link = str(run.settings.get("compression", "")), run.meta.get("link")
    sizes = {bucket["name"]: bucket["nbytes"] for bucket in run.meta.get("buckets", [])}
    known = {
        name: columns["relative_error"][np.isfinite(columns["relative_error"])]
        for name, columns in run.first.buckets.items()
        if sizes.get(name)
    }
    lost = [(float(np.median(errors**2)), sizes[name]) for name, errors in known.items() if len(errors)]
    residual = run.first.steps["residual_norm"]
    is_fixed = not spec.startswith(("auto", "schedule"))
    if run.num_steps < ENOUGH or not (is_fixed and link and lost and np.nanmax(residual, initial=0.0) > 0.0):
        return None
    share = float(np.average([each for each, _ in lost], weights=[size for _, size in lost]))
    progress = max(usual(share), _LEAST_PROGRESS)
    step, sent, plain = (median(run, "step_ms"), median(run, "bytes"), median(run, "bytes") * median(run, "ratio"))
    coding = median(run, "encode_ms") + median(run, "decode_ms")

    def bytes_of(format: Format) -> float:
        return plain * format.wire_bytes(_ELEMENTS) / (4 * _ELEMENTS)

    def milder(format: Format) -> tuple[float, float, str]:
        longest = step + coding + (bytes_of(format) - sent) * 1e-6 * link["ns_per_byte"]
        return longest / expected_progress(format), longest, format.spec

    now, mild = step / progress, [format for format in map(formats.parse, _MILD) if bytes_of(format) > 1.1 * sent]
    best, longest, name = min(map(milder, mild), default=(math.inf, math.inf, ""))
    if best > _WORTH * now:
        return None
    return (
        f"{spec} lets {1.0 - share:.0%} of the energy of gradient + residual through. A step then usually makes about "
        f"{progress:.0%} of the progress of an uncompressed one: {step:.1f} ms per step are {now:.1f} ms for that "
        f"progress. {name} would take {longest:.1f} ms per step at most, and {best:.1f} ms for the same progress"
    )


def slow_rank(run: Run) -> str | None:
    """The others wait for one rank throughout the run, or since its middle.

    Other programs on a shared machine delay a rank only for a while.
    """
    if len(run.ranks) < 2:
        return None
    step, exposed = run.of_all("step_ms"), run.of_all("exposed_ms")
    known = ~(np.isnan(step) | np.isnan(exposed)).any(0)
    if known.sum() < ENOUGH:
        return None
    step, exposed = step[:, known][:, WARM_UP:], exposed[:, known][:, WARM_UP:]
    own = trimmed((step - exposed).T)  # of each rank, without the exchange
    total = float(trimmed(step.T).mean())
    slowest = int(own.argmax())
    others = float(np.median(np.delete(own, slowest)))
    behind = own[slowest] - others
    if behind < _BEHIND * total or behind < 0.25 * others or behind < 5.0:
        return None
    parts = np.array([trimmed(part.T) for part in np.array_split(step - exposed, _PARTS, 1)])
    gaps = parts[:, slowest] - np.median(np.delete(parts, slowest, 1), 1)
    is_behind = gaps > 0.5 * behind
    if is_behind.mean() < _MOST and not is_behind[_PARTS // 2 :].all():
        return None
    waits = np.delete(trimmed(exposed.T), slowest)
    return (
        f"rank {run.ranks[slowest].number} takes {own[slowest]:.1f} ms of its own per step, the others "
        f"{others:.1f} ms; they wait {waits.mean():.1f} ms for the exchange, it waits "
        f"{trimmed(exposed.T)[slowest]:.1f} ms (a step takes {total:.1f} ms)"
    )


def to_and_fro(run: Run) -> str | None:
    """`auto` switches a bucket back to what it had before, again and again; trials of two steps do not count."""
    unsteady: list[tuple[int, str]] = []  # times back, what is found
    for name, columns in run.first.buckets.items():
        stays = [(spec, len(list(steps))) for spec, steps in itertools.groupby(columns["compressor"].tolist())]
        turns = [spec for spec, _ in itertools.groupby(spec for spec, steps in stays if steps > TRIAL_STEPS)]
        returns = sum(turns[i] in turns[max(0, i - 3) : i] for i in range(1, len(turns)))
        steps = len(columns["step"])
        if returns >= max(_RETURNS, steps / _STEPS):
            most = " and ".join(compressor for compressor, _ in Counter(turns).most_common(2))
            switches = f"bucket {name} switched {len(turns) - 1} times in {steps} steps"
            unsteady.append((returns, f"{switches}, {returns} times back, mostly between {most}"))
    _, worst = max(unsteady, key=lambda bucket: bucket[0], default=(0, None))
    return worst


def small_buckets(run: Run) -> str | None:
    """Gradients cross in many small buckets."""
    sizes = [b["nbytes"] for b in run.meta.get("buckets", []) if b["nbytes"] > 0]
    if len(sizes) < 4 or np.median(sizes) >= _SMALL_BUCKET:
        return None
    return (
        f"gradients of {sum(sizes) / 1e6:.3g} MB cross in {len(sizes)} buckets of {np.median(sizes) / 1e3:.3g} kB "
        f"(median); bucket_bytes is {run.settings.get('bucket_bytes')}, groups is {run.settings.get('groups')}"
    )


def memory_grows(run: Run) -> str | None:
    """The memory of a process grows throughout the run."""
    growths: list[tuple[float, str]] = []
    for rank in run.ranks:
        memory = rank.steps["memory_mb"]
        memory = memory[~np.isnan(memory)]
        if len(memory) < 4 * FEWEST:
            continue
        memory = memory[len(memory) // 4 :]  # by then everything is allocated
        parts = np.array([np.median(part) for part in np.array_split(memory, 6)])
        growth, rises = parts[-1] - parts[0], np.diff(parts)
        # The growth is steady if most of the parts add their share.
        is_steady = (rises > 0.25 * growth / len(rises)).sum() >= len(rises) - 1
        if growth > max(20.0, 0.03 * parts[0]) and is_steady:
            sizes = f"from {parts[0]:.0f} to {parts[-1]:.0f} MB"
            per_step = growth / (len(memory) * 5 / 6)
            lately = f"in the last three quarters of the run, {1e3 * per_step:.0f} MB per 1000 steps"
            growths.append((growth, f"rank {rank.number} grows steadily {sizes} {lately}"))
    if not growths:
        return None
    _, text = max(growths)
    total = run.meta.get("memory_total_mb")
    return text + (f"; the host has {total:.0f} MB" if total else "")


RULES: tuple[Rule, ...] = (
    Rule("loss diverges", loss_diverges,
         "lower the learning rate, or warm it up (hvdc.callbacks.LearningRateWarmupCallback). If it had not risen "
         "before it was no number, look at the data and the loss function instead (NaN in the input, log(0), 0/0). If "
         "it trains well with compression='none', compress less (a larger ratio, int8) and leave error_feedback at "
         "its default"),
    Rule("loss oscillates", loss_oscillates,
         "lower the learning rate or clip gradients. If it is calm with compression='none', compress less and leave "
         "error_feedback at its default"),
    Rule("residual grows", residual_grows,
         "more is held back than is sent: compress less (a larger ratio, more bits), set residual_decay a little "
         "below 1, or leave error_feedback at its default for this compressor"),
    Rule("the guard acted", guard_acted,
         "compress less from the beginning, with the compressor that it changed to, or lower the learning rate. If it "
         "went back and nothing more happened, something else disturbed training for a time"),
    Rule("ranks drift apart", drift_grows,
         "make rounds shorter (local_steps) or lower the learning rate, and compare the loss with that of a run that "
         "exchanges each step; if the learning rate was still warming up, judge a longer run"),
    Rule("outer step too long", outer_step_too_long,
         "lower lr or momentum of outer, or use outer='average'"),
    Rule("batch normalization drifts", statistics_differ,
         "validation uses the mean of statistics that differ: make rounds shorter (local_steps), give all ranks like "
         "data, or use layer or group normalization"),
    Rule("communication dominates", communication_dominates,
         "compress more (compression='auto', or hybrid with a smaller ratio); more samples or "
         "backward_passes_per_step for each exchange; where little is sent already, it is the network's latency: "
         "fewer, larger buckets"),
    Rule("compression costs more than it saves", compression_costs,
         "use compression='none' on this network, a cheaper compressor such as int8, or 'auto', which knows no "
         "compression"),
    Rule("compression loses progress", loses_progress,
         "use compression='auto', which counts progress and not only steps, or the milder compressor; compare losses "
         "after equal times. The progress is an estimate from the energy that gets through: auto measures it"),
    Rule("slow rank", slow_rank,
         "look at this rank's input pipeline (prefetch, storage, augmentation), its share of the data, and what else "
         "runs on its host; every other rank waits for it in every step"),
    Rule("switching to and fro", to_and_fro,
         "auto cannot decide: the network changes, or two candidates are equally good. Name fewer candidates, or the "
         "one that was used most, as compression"),
    Rule("small buckets", small_buckets,
         "each bucket costs some milliseconds of latency: leave bucket_bytes at its default (25 MB) and groups unset"),
    Rule("memory grows", memory_grows,
         "something is kept from step to step: tensors or logs appended to a list, tf.function traced again and again "
         "(Python numbers as arguments), a dataset.cache() without limit"),
)  # fmt: skip
