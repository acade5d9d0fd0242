"""How `auto` begins: costs from the calibration, what white noise would lose, and the first choice."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common import tracing
from ..common.elastic import is_elastic
from ..common.phases import Phase
from ..compressors import Auto, Compressor
from ..compressors.resolve import resolve
from ..cost import Calibration, CostModel, Link
from ..cost.calibrate import estimate
from ..cost.measure_kernels import default_costs
from ..cost.measure_links import LARGEST_BURST
from ..engine import agreement
from ..engine.grouping import Shape
from ..engine.model_layout import ModelLayout
from ..engine.plan import Plan
from ..engine.settings import Settings
from ..exchange import choice, volume
from ..kernels import native
from . import choices, policy
from .predictions import Predictions
from .rows import RowSavings
from .selector import AutoSelector
from .traces import traces_all
from .usual_progress import OF_DELAY, assumed, at_least, of_round, usual

# Seconds per byte. On a fast link the bytes may seem to take no time, but a slower link is one that multiplies it.
_LEAST_TRANSFER = 1e-10
# Seconds. Compression begins later if it is predicted to gain less in a step: XLA takes about a second to compile
# kernels, and a graph with native operations takes 0.2 s more to trace than one without.
_LEAST_GAIN = {"xla": 0.01, "native": 0.003}
# The same for rows of embeddings, whose native operations take less than 0.1 s to trace.
_LEAST_GAIN_OF_ROWS = {"xla": 0.01, "native": 0.0005}
# Seconds that a later trace takes for each shape of a matrix that a new model-wide candidate compiles kernels for, on
# one core, with dense layers. In a first trace it was 0.6, as with a transformer.
_COMPILE_SECONDS = 0.9
# On links slower than this, in bits per second, a calibration does not see all bursts.
_SLOW_RATE = 30e6
# With less, the quotient of time and progress says nothing.
_LEAST_PROGRESS = 1e-3
# Horovod's own compressor: reports compare with it, candidate or not.
_COMPARED = ("fp16",)


def selector(plan: Plan, calibrated: Calibration) -> AutoSelector:
    """Makes the selector for the buckets of `auto`, with its first choice.

    All ranks call it together. The numbers of rank 0 decide.
    """
    layout, group = plan.layout, plan.settings.process_set
    auto: Auto = layout.auto
    if auto.warmup and not tracing.can_forget_traces():
        raise ValueError("auto: warmup needs a version of TensorFlow whose functions can be traced again: leave it out")
    burst = _burst(calibrated) if auto.link is None else 0.0
    own_costs, shapes = _costs(plan, calibrated, auto.candidates), layout.shapes_of(layout.auto_buckets[0])
    own_seconds, nbytes, rules = sum(own_costs), _nbytes(layout), _rules(auto)
    own_lost = [_lost(c, layout.model_wide.shapes if c.model_wide else shapes) for c in auto.candidates]
    savings = RowSavings(layout.embeddings, _model(calibrated))
    names = [getattr(candidate, "name", "") for candidate in auto.candidates]

    def value_by(progress: Callable[[float, str, bool], float], lost: Sequence[float]) -> policy.Value:
        """What the candidates are worth, by a function of `usual_progress`; [C] each."""
        of_each = [progress(share, name, plan.settings.normalized) for share, name in zip(lost, names)]
        return policy.Value(np.array(of_each, np.float32), np.array(lost, np.float32))

    with tf.device("CPU"):
        # If all candidates are compared from the first steps on, what is not measured yet counts with the lower bound.
        expected = value_by(at_least if traces_all(auto) else assumed, own_lost)
        first = _first_choice(auto, rules, nbytes, own_seconds, expected)
        least_gain = 0.0 if traces_all(auto) else _LEAST_GAIN_OF_ROWS["xla" if savings.needs_xla else "native"]
        rows = savings.at_most() >= least_gain
        parts = [np.ravel(part) for part in (*own_costs, burst, own_lost, first, rows)]
        numbers = tf.constant(np.concatenate(parts), tf.float32)
        numbers = hvd.broadcast(numbers, group.ranks[0], name="hvdc_first_choice", process_set=group).numpy()
        *costs, (burst,), lost, choice, wants_rows = np.split(numbers, np.cumsum([part.size for part in parts[:-1]]))
        compresses_rows = not tracing.can_forget_traces() or not savings.any or bool(wants_rows)
        others = {
            compressor.spec: _costs(plan, calibrated, [compressor])
            for compressor in map(resolve, _COMPARED)
            if compressor not in auto.candidates
        }
        predictions = Predictions(
            rules=rules,
            nbytes=nbytes,
            costs=policy.Costs(*(part.reshape(own_costs.encode.shape) for part in costs)),
            burst=float(burst),
            prior=value_by(at_least, lost.tolist()),
            usual=value_by(usual, lost.tolist()).progress,
            names=names,
            row_savings=savings,
            compile_seconds=[_compile_seconds(candidate, layout.model_wide.shapes) for candidate in auto.candidates],
            others=others,
        )
        return AutoSelector(plan, predictions, tf.constant(choice, tf.int32), compresses_rows)


def _compile_seconds(candidate: Compressor, shapes: Sequence[Shape]) -> float:
    """Seconds that a later trace takes for a model-wide candidate's kernels.

    For others it is 0: `traces` counts their kernels with their operations.
    """
    of_model: Any = candidate  # only model-wide ones have matrices
    return _COMPILE_SECONDS * len({of_model.matrix(shape) for shape in shapes} - {None}) if of_model.model_wide else 0.0


def _first_choice(
    auto: Auto, rules: policy.Rules, nbytes: Sequence[int], seconds: np.ndarray, value: policy.Value
) -> np.ndarray:
    """The position of each bucket's candidate, int32 [B].

    Args:
        auto: The compressor `auto`.
        rules: Its rules.
        nbytes: Bytes of each bucket, as float32.
        seconds: [B, C], of each bucket's exchange with each candidate.
        value: What the candidates are taken to be worth, NumPy arrays.
    """
    buckets = len(nbytes)
    sizes, waits = np.array(nbytes, np.float32), np.zeros(buckets, np.float32)
    begin = auto.warmup_steps if auto.warmup else 0
    allowed = policy.admit(np, rules, np.zeros(0, np.int32), value, auto.target_at(begin))

    def cost_of(picks: np.ndarray) -> np.ndarray:
        return np.asarray(policy.cost_by_rules(np, rules, picks, waits, seconds, sizes, policy.FIRST_REST, value))

    options = choices.options(rules.uncompressed, rules.model_wide, buckets)
    costs = np.where(allowed[options].all(-1), cost_of(options), np.inf)
    first: np.ndarray = options[np.argmin(costs)]
    if any(rules.uncompressed) and not traces_all(auto):
        plain = np.full(buckets, rules.uncompressed.index(True), np.int32)
        if cost_of(plain[None])[0] - costs.min() < _LEAST_GAIN[native.kind()]:
            return plain
    return first


def _rules(auto: Auto) -> policy.Rules:
    """What `auto` may choose, and what it looks for."""
    uncompressed = [candidate.uncompressed for candidate in auto.candidates]
    by_progress = auto.objective == "progress"
    return policy.Rules(
        uncompressed, auto.model_wide_candidates, auto.max_slowdown, by_progress, auto.min_progress, auto.budget
    )


def _nbytes(layout: ModelLayout) -> list[int]:
    """Bytes of each bucket of `auto`, as float32."""
    return [4 * sum(shape[0] for shape in layout.shapes_of(b)) for b in layout.auto_buckets]


def only_candidate(settings: Settings, layout: ModelLayout, calibrated: Calibration) -> Compressor:
    """The candidate for all of training, with local steps or a delay: the one with the most progress per second.

    All ranks call it together. The numbers of rank 0 decide.
    """
    auto: Auto = layout.auto
    group, model, rest = settings.process_set, _model(calibrated), policy.FIRST_REST
    per_bucket = [candidate for candidate in auto.candidates if not candidate.model_wide]

    def seconds(candidate: Compressor) -> float:
        """Of a step, for the progress of one without local steps or delay; at best."""
        predicted = []
        for b in layout.auto_buckets:
            shapes = layout.shapes_of(b)
            collective = choice.choose(candidate, shapes, group.size())
            # A link grants its burst only once in a step.
            predicted.append(model.predict(candidate, 4 * sum(map(math.prod, shapes)), collective.name).sustained)
        exchange, wire = (sum(getattr(one, name) for one in predicted) for name in ("total", "wire"))
        if auto.local_steps:
            return min((rest + exchange / length) / of_round(length) for length in auto.local_steps)
        if 1 not in auto.delay:
            return rest + exchange
        delayed = (exchange - wire + max(rest, wire)) / OF_DELAY
        if 0 not in auto.delay:
            return delayed
        # Uncompressed gradients are in no buckets, which decide when the delay begins.
        return rest + exchange if candidate.uncompressed else min(delayed, rest + exchange)

    def cost(candidate: Compressor) -> float:
        lost, name = _lost(candidate, layout.shapes_of(layout.auto_buckets[0])), getattr(candidate, "name", "")
        is_normalized = settings.normalized and not auto.local_steps  # local steps exchange movements
        is_enough = usual(lost, name, is_normalized) >= max(auto.min_progress, _LEAST_PROGRESS)
        return seconds(candidate) / assumed(lost, name, is_normalized) if is_enough else math.inf

    costs = [cost(candidate) for candidate in per_bucket]
    if min(costs) == math.inf:
        raise ValueError(
            f"auto: no candidate is expected to make min_progress={auto.min_progress} of the progress: lower it, or "
            "add none to candidates"
        )
    best = int(np.argmin(costs))
    with tf.device("CPU"):
        agreed = hvd.broadcast(tf.constant(best), group.ranks[0], name="hvdc_only_candidate", process_set=group)
    return per_bucket[int(agreed)]


def _lost(candidate: Compressor, shapes: Sequence[Shape]) -> float:
    """The share of the energy of white noise that a candidate loses; a user's may say anything."""
    return min(1.0, max(0.0, candidate.noise_loss(shapes)))


def calibration(auto: Auto, settings: Settings, chunk: Shape) -> Calibration:
    """Loads the calibration from the file in HVD_COMPRESS_CALIBRATION, or estimates one, in less than a second.

    With `auto.link`, the network is not measured.

    All ranks call it together. Kernels are measured on a chunk of the shape `chunk`.

    Raises:
        ValueError: The file does not fit; the environment variable is set on some ranks only, or beside `auto.link`.
    """
    path = os.environ.get("HVD_COMPRESS_CALIBRATION", "").strip()
    variable, group = "environment variable HVD_COMPRESS_CALIBRATION", settings.process_set
    loaded = agreement.on_all(
        group, "hvdc_calibration", variable, lambda: _loaded(path, auto, group.size()) if path else None
    )
    ranks_without = [str(rank) for rank, file in enumerate(loaded) if file is None]
    if 0 < len(ranks_without) < len(loaded):
        raise ValueError(f"{variable} is not set on rank {', '.join(ranks_without)}: set it on all ranks or on none")
    if loaded[0] is not None and auto.link is not None:
        raise ValueError(
            f"auto: link={auto.link} and {variable} say both how fast the network is: leave one of them out"
        )
    if loaded[0] is not None:
        return loaded[0]
    what = "the kernels" if auto.link is not None else "the link and the kernels"
    with Phase(f"timing {what} for auto", "usually less than a second", group.rank() == 0):
        return estimate(auto.candidates, group, chunk[0], auto.known_link)


def _loaded(path: str, auto: Auto, ranks: int) -> Calibration | None:
    """The calibration in the file; None if an elastic job has another number of ranks now: it calibrates again."""
    calibration = Calibration.load(path)
    if calibration.ranks != ranks:
        if is_elastic():
            return None
        raise ValueError(f"{path} was measured between {calibration.ranks} ranks, not between {ranks}: calibrate again")
    if unmeasured := calibration.unmeasured(auto.candidates):
        raise ValueError(f"{path} does not know what {unmeasured[0]} costs: calibrate again, with all candidates")
    return calibration


def _model(calibration: Calibration) -> CostModel:
    """The cost model; a calibration holds the candidates, but not all of `_COMPARED` nor all compressors of rows."""
    model = calibration.model()
    model.kernels = {**default_costs().kernels, **model.kernels}
    return model


def _costs(plan: Plan, calibration: Calibration, compressors: Sequence[Compressor]) -> policy.Costs:
    """The predicted costs of each bucket with each compressor; those of model-wide ones stand with the last bucket."""
    model, layout = _model(calibration), plan.layout

    def cost(b: int, candidate: Compressor) -> tuple[float, ...]:
        shapes = plan.shapes_of(b, candidate)
        if not shapes:
            return 0.0, 0.0, 0.0, 0.0
        payload = volume.payload_bytes(candidate, shapes) if candidate.model_wide else None
        nbytes = 4 * sum(map(math.prod, shapes))
        prediction = model.predict(candidate, nbytes, plan.collective(candidate, shapes).name, payload=payload)
        # A link grants its burst only once in a step.
        transfer = prediction.sustained.wire - prediction.latency
        transfer = max(transfer, _LEAST_TRANSFER * prediction.payload)
        # Not part of the wire: the link inside a host does not change with the one between hosts.
        encode = prediction.encode + prediction.inside
        return encode, prediction.latency, transfer, prediction.decode

    table = [[cost(b, candidate) for candidate in compressors] for b in layout.auto_buckets]
    return policy.Costs(*np.moveaxis(np.array(table, np.float32), 2, 0))


def _burst(calibration: Calibration) -> float:
    """Seconds in which the bytes would cross that a link may transmit at once after a pause, at the calibrated rate."""

    def seconds(link: Link) -> float:
        is_slow = link.beta > 8 / _SLOW_RATE
        return link.beta * (link.burst or (LARGEST_BURST if is_slow else 0.0))

    return max(map(seconds, calibration.links.values()), default=0.0)
