"""What can be wrong with a run: one rule per fault, each a function of the run that says what it saw, or None.

Rules compare a run with itself (its beginning with its end, ranks and buckets with each other, times with the step),
so that they hold for any model and machine. Times are medians or means over many steps; the first ones, in which
things are compiled, are left out. Where there is too little to judge by, a rule is silent.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .figures import FEWEST, WARM_UP, late, link_of, median, rate, trimmed
from .run_log import Run
from .training_rules import loss_diverges, loss_oscillates, residual_grows

# Of a step, that is worth a word, and milliseconds below which nothing is.
_MUCH, _STEADY, _SHARE = 0.4, 0.5, 0.2
_FIXED_MS = 20.0
# Of a step, and milliseconds, that compression must cost more than it saves.
_LOST, _FEW_MS = 0.15, 3.0
# A link's latency that counts by itself.
_FAR_MS = 30.0
# Into how many parts a run is cut, and the share of them in which a rank must be behind.
_PARTS, _MOST = 8, 0.75
# Steps for which `auto` tries a candidate at most, before it goes back by design.
_TRIAL = 3
# How often it must come back: at least, and once in so many steps.
_RETURNS, _STEPS = 2, 500
_SMALL_BUCKET = 256 * 1024


class Rule(NamedTuple):
    """A fault.

    Attributes:
        name: What it is called.
        check: What shows it, with the figures, in one line; None where it is not there.
        advice: What to change.
    """

    name: str
    check: Callable[[Run], str | None]
    advice: str


def communication_dominates(run: Run) -> str | None:
    """Much of a step is waiting for the exchange: for bytes, or for a link of high latency."""
    step, exposed = late(run.fastest("step_ms")), late(run.fastest("exposed_ms"))
    if step is None or exposed is None:
        return None
    total, wait = float(np.median(step)), float(np.median(exposed))
    if wait < _MUCH * total or wait < _FIXED_MS:
        return None
    latency, per_byte = link_of(run)
    wire, sent = median(run, "wire_ms"), median(run, "bytes")
    # What even nine of ten steps wait for on the wire: the link's doing, while a busy processor's comes and goes.
    # On emulated links it is over 80% of a step, on one loaded machine without any under 40%.
    on_wire = late(np.minimum(run.fastest("exposed_ms"), run.fastest("wire_ms")))
    steady = 0.0 if on_wire is None else float(np.percentile(on_wire, 10))
    is_measured = sent * per_byte >= 0.25 * total or latency >= _FAR_MS
    if not is_measured and steady < max(_STEADY * total, _FIXED_MS):
        return None
    per_byte = max(per_byte, steady / max(sent, 1.0))
    return (
        f"of a step's {total:.1f} ms, {wait:.1f} ms ({wait / total:.0%}) are spent waiting for the "
        "exchange after the last "
        f"gradient is there; {wire:.1f} ms are on the wire; each rank sends "
        f"{sent / 1e6:.3g} MB per step, "
        f"compressed {median(run, 'ratio'):.1f} times, {rate(per_byte)}"
    )


def compression_costs(run: Run) -> str | None:
    """Encoding and decoding take longer than the bytes that they save would, and steps wait for it."""
    _, per_byte = link_of(run)
    # Buckets may be encoded side by side.
    cost = min(median(run, "encode_ms") + median(run, "decode_ms"), median(run, "exchange_ms"))
    step, exposed = median(run, "step_ms"), median(run, "exposed_ms")
    sent, ratio = median(run, "bytes"), median(run, "ratio")
    if not ratio > 1.05 or len(run.first.steps["step"]) < FEWEST + WARM_UP:
        return None
    saved = (ratio - 1.0) * sent * per_byte
    # What the backward pass hides costs nothing.
    lost = min(cost - saved, exposed)
    if cost < 1.25 * saved or lost < max(_LOST * step, _FEW_MS):
        return None
    return (
        f"encoding and decoding take {cost:.1f} ms of a step's {step:.1f} ms, and save about {saved:.1f} "
        "ms on the wire: "
        f"{(ratio - 1.0) * sent / 1e6:.3g} MB less {rate(per_byte)}"
    )


def slow_rank(run: Run) -> str | None:
    """One rank is later than the others, which wait for it: throughout the run, or since its middle.

    What else runs on a shared machine delays a rank in bursts, and that passes.
    """
    if len(run.ranks) < 2:
        return None
    step, exposed = run.of_all("step_ms"), run.of_all("exposed_ms")
    known = ~(np.isnan(step) | np.isnan(exposed)).any(0)
    if known.sum() < FEWEST + WARM_UP:
        return None
    step, exposed = step[:, known][:, WARM_UP:], exposed[:, known][:, WARM_UP:]
    own = trimmed((step - exposed).T)  # what each rank takes by itself, the exchange left out
    total = float(trimmed(step.T).mean())
    slowest = int(own.argmax())
    others = float(np.median(np.delete(own, slowest)))
    behind = own[slowest] - others
    if behind < _SHARE * total or behind < 0.25 * others or behind < 5.0:
        return None
    parts = np.array([trimmed(part.T) for part in np.array_split(step - exposed, _PARTS, 1)])
    gaps = parts[:, slowest] - np.median(np.delete(parts, slowest, 1), 1)
    is_behind = gaps > 0.5 * behind
    if is_behind.mean() < _MOST and not is_behind[_PARTS // 2 :].all():
        return None
    waits = np.delete(trimmed(exposed.T), slowest)
    return (
        f"rank {run.ranks[slowest].number} takes {own[slowest]:.1f} ms of its own per step, the others "
        f"{others:.1f} ms; they "
        f"wait {waits.mean():.1f} ms for the exchange, it waits {trimmed(exposed.T)[slowest]:.1f} ms (a step takes "
        f"{total:.1f} ms)"
    )


def to_and_fro(run: Run) -> str | None:
    """`auto` switches a bucket back to what it had before, again and again; trials of two steps do not count."""
    worst: tuple[int, int, str, Counter[str], int] | None = None
    for name, columns in run.first.buckets.items():
        stays = [
            (kind, len(list(group))) for kind, group in itertools.groupby(columns["compressor"].tolist())
        ]
        runs = [kind for kind, _ in itertools.groupby(kind for kind, steps in stays if steps > _TRIAL)]
        returns = sum(runs[i] in runs[max(0, i - 3) : i] for i in range(1, len(runs)))
        if returns >= max(_RETURNS, len(columns["step"]) / _STEPS) and (worst is None or returns > worst[0]):
            worst = (returns, len(runs) - 1, name, Counter(runs), len(columns["compressor"]))
    if worst is None:
        return None
    returns, switches, name, counts, steps = worst
    most = " and ".join(compressor for compressor, _ in counts.most_common(2))
    return f"bucket {name} switched {switches} times in {steps} steps, {returns} times back, mostly between {most}"


def small_buckets(run: Run) -> str | None:
    """Gradients cross in many small buckets."""
    sizes = [b["nbytes"] for b in run.meta.get("buckets", []) if b["nbytes"] > 0]
    if len(sizes) < 4 or np.median(sizes) >= _SMALL_BUCKET:
        return None
    return (
        f"gradients of {sum(sizes) / 1e6:.3g} MB cross in {len(sizes)} buckets of "
        f"{np.median(sizes) / 1e3:.3g} kB (median); "
        f"bucket_bytes is {run.settings.get('bucket_bytes')}, groups is {run.settings.get('groups')}"
    )


def memory_grows(run: Run) -> str | None:
    """The memory of a process grows throughout the run."""
    worst: tuple[float, str] | None = None
    for rank in run.ranks:
        memory = rank.steps.get("memory_mb")
        memory = None if memory is None else memory[~np.isnan(memory)]
        if memory is None or len(memory) < 4 * FEWEST:
            continue
        most = memory[len(memory) // 4 :]  # by then all is allocated
        parts = np.array([np.median(part) for part in np.array_split(most, 6)])
        growth, rises = parts[-1] - parts[0], np.diff(parts)
        # Steadily: most of the parts add their share.
        steady = (rises > 0.25 * growth / len(rises)).sum() >= len(rises) - 1
        if growth > max(20.0, 0.03 * parts[0]) and steady and (worst is None or growth > worst[0]):
            steps = len(most) * 5 / 6
            text = (
                f"rank {rank.number} grows steadily from {parts[0]:.0f} to {parts[-1]:.0f} MB in the last three "
                "quarters of "
                f"the run, {1e3 * growth / steps:.0f} MB per 1000 steps"
            )
            total = run.meta.get("memory_total_mb")
            worst = (growth, text + (f"; the host has {total:.0f} MB" if total else ""))
    return None if worst is None else worst[1]


RULES: tuple[Rule, ...] = (
    Rule(
        "loss diverges",
        loss_diverges,
        "lower the learning rate, or warm it up (hvdc.callbacks.LearningRateWarmupCallback). If it had not risen "
        "before it was no number, look at the data and the loss function instead (NaN in the input, log(0), 0/0). "
        "If it trains well with "
        "compression='none', compress less (a larger ratio, int8) and leave error_feedback at its default",
    ),
    Rule(
        "loss oscillates",
        loss_oscillates,
        "lower the learning rate or clip gradients. If it is calm with compression='none', compress less and leave "
        "error_feedback at its default",
    ),
    Rule(
        "residual grows",
        residual_grows,
        "more is held back than is sent: compress less (a larger ratio, more bits), set residual_decay a "
        "little below 1, "
        "or leave error_feedback at its default for this compressor",
    ),
    Rule(
        "communication dominates",
        communication_dominates,
        "compress more (compression='auto', or hybrid with a smaller ratio); more samples or backward_passes_per_step "
        "for each exchange; where little is sent already, it is the network's latency: fewer, larger buckets",
    ),
    Rule(
        "compression costs more than it saves",
        compression_costs,
        "use compression='none' on this network, a cheaper compressor such as int8, or 'auto', which "
        "knows no compression",
    ),
    Rule(
        "slow rank",
        slow_rank,
        "look at this rank's input pipeline (prefetch, storage, augmentation), its share of the data, "
        "and what else runs "
        "on its host; every other rank waits for it in every step",
    ),
    Rule(
        "switching to and fro",
        to_and_fro,
        "auto cannot decide: the network changes, or two candidates are equally good. Name fewer "
        "candidates, or the one "
        "that was used most, as compression",
    ),
    Rule(
        "small buckets",
        small_buckets,
        "each bucket costs some milliseconds of latency: leave bucket_bytes at its default (25 MB) and groups unset",
    ),
    Rule(
        "memory grows",
        memory_grows,
        "something is kept from step to step: tensors or logs appended to a list, tf.function traced again and again "
        "(Python numbers as arguments), a dataset.cache() without limit",
    ),
)  # fmt: skip
