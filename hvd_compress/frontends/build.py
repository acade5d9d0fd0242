"""Makes plans: this is where selectors, transforms and observers are put into the engine.

What a plan needs to know of the network is found here: whether exchanges are hierarchical, the cost of the link, and
the first choice of `auto`. All ranks make a plan together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..auto import flat_or_hierarchical, start
from ..auto.delay_choice import DelayChoice
from ..checkpoint import plan_state
from ..common import determinism, names, tracing
from ..common.phases import Phase
from ..common.verbosity import say
from ..compressors import Compressor, NoCompression
from ..engine import guarding, progress
from ..engine.model_layout import ModelLayout, model_layout
from ..engine.plan import Plan
from ..engine.reducer import Reducer
from ..engine.selector import selector_for
from ..engine.settings import Settings
from ..engine.state import new_state
from ..engine.transforms import transforms_for
from ..exchange import hosts
from ..exchange.hosts import Hosts
from ..monitor import end_summary, environment, recorder, tuning


def new_reducer(settings: Settings) -> Reducer:
    """The object that reduces gradients with these settings."""
    environment.install()
    return Reducer(settings, new_plan)


def new_plan(reducer: Reducer, name: str, gradients: Sequence[Any], variables: Sequence[Any], watched: bool) -> Plan:
    """The plan for a list of gradients. All ranks call it together.

    1. Layout: divides the gradients.
    2. State: makes the variables.
    3. Hierarchical or flat: decided for each compressor by the cost model.
    4. Selectors, transforms and observers. For `auto`, the link and the kernels are calibrated.
    5. Restores the state that was loaded before, if any.

    The names of its collectives begin with `name`. If `watched`, some rank records steps, and the link is measured.
    """
    settings = reducer.settings
    with tf.init_scope():
        all_hosts = hosts.usable(settings.process_set, settings.hierarchical)
        may_be_hierarchical = settings.hierarchical is not False and not (
            settings.momentum_correction or settings.delay
        )
        used_hosts = all_hosts if may_be_hierarchical else None
        only: int | None = None  # stands for the candidate for all of training
        workers = 1 if used_hosts is None else used_hosts.workers
        layout = model_layout(settings, gradients, variables, workers)
        if layout.auto is not None and determinism.is_enabled():
            raise ValueError(
                f"{layout.auto.spec}: after tf.config.experimental.enable_op_determinism(), auto cannot choose, since "
                "it does so by times, which differ from run to run: pass another compressor, such as "
                'compression="int4", or do not make the call'
            )
        if settings.takes_candidate:
            candidate = _candidate(reducer, layout)
            only = None if layout.auto is None else names.checksum(candidate.spec)
            settings = settings.with_candidate(candidate)
            layout = model_layout(settings, gradients, variables, workers)
            # A delay begins by the times of buckets, and rows cannot wait.
            if reducer.settings.chooses_delay and (layout.sparse or not layout.buckets):
                settings = dataclasses.replace(settings, delay=0)
        if settings.delay and layout.sparse:
            raise ValueError(
                f"delay=1 does not work with the rows of {layout.paths[layout.sparse[0]]}, whose number differs from "
                "step to step: pass sparse_as_dense=True, or delay=0"
            )
        state = new_state(name, settings, layout)
        flat = _flat_compressors(settings, layout, used_hosts)
        compressors = [layout.group_of(b).compressor for b in range(len(layout.buckets))]
        selectors = [selector_for(c, state) for c in compressors if not c.automatic]
        transforms = transforms_for(settings)
        plan = Plan(name, settings, layout, state, selectors, transforms, used_hosts, all_hosts, flat)
        plan.round_length = reducer.round_length
        if only is not None:
            plan.only_candidate = tracing.variable(tf.constant(only, tf.int64), "hvdc_candidate")
        if layout.auto is not None:
            _add_auto(plan)
        if reducer.settings.chooses_delay and settings.delay:
            plan.delay_selector = DelayChoice(settings)
            plan.observers.append(plan.delay_selector)
        if tuning.is_on():
            plan.observers.append(tuning.StepClock(name, lambda: plan.local_steps))
        if watched:
            with Phase("timing the link", "usually less than a second", settings.process_set.rank() == 0):
                plan.link = recorder.measure_link(settings.process_set)
    plan_state.take_pending(reducer, plan)
    if reducer.guard is not None:
        guarding.attach(plan, reducer.guard, is_new=True)
    if plan.auto is not None:
        plan.auto.log_choice()
    with tf.init_scope():
        progress.start(plan, reducer.epoch)
    if settings.process_set.rank() == 0:
        _say_if_narrowed(layout)
    tuning.settings(settings)
    end_summary.watch(reducer)
    environment.begin(plan)
    return plan


def _say_if_narrowed(layout: ModelLayout) -> None:
    rows = [i for i, table in zip(layout.sparse, layout.embeddings) if not table.compressor.uncompressed]
    compressed = [i for group in layout.param_groups for i in group.layout.tensors.members] + rows
    wide = [layout.paths[i] for i in sorted(compressed) if layout.dtypes[i] == tf.float64]
    if wide:
        more = f" and {len(wide) - 1} more" if len(wide) > 1 else ""
        say(
            f"the float64 gradient of {wide[0]}{more}: compression works in float32, and values beyond 3.4e38 become "
            f'NaN; policy={{"{wide[0]}": "none"}} sends it as it is',
            "warning",
        )


def _candidate(reducer: Reducer, layout: ModelLayout) -> Compressor:
    """The one that takes the place of `auto`: that of the checkpoint, if there is one."""
    settings, group = reducer.settings, reducer.settings.process_set
    if layout.auto is None:  # there is nothing to compress
        return NoCompression()
    saved = (state.replicated_state.get("only_candidate", -1) for state in reducer.pending)
    with tf.device("CPU"):
        first = tf.constant(next((int(one) for one in saved if one >= 0), -1), tf.int64)
        known = int(hvd.broadcast(first, group.ranks[0], name="hvdc_saved_candidate", process_set=group))
    candidates: Sequence[Compressor] = layout.auto.candidates
    for candidate in candidates:
        if names.checksum(candidate.spec) == known:
            return candidate
    calibrated = start.calibration(layout.auto, settings, layout.shapes_of(layout.auto_buckets[0])[0])
    return start.only_candidate(settings, layout, calibrated)


def _add_auto(plan: Plan) -> None:
    layout, settings, used_hosts = plan.layout, plan.settings, plan.hosts
    shapes = [layout.shapes_of(b) for b in layout.auto_buckets]
    calibrated = start.calibration(layout.auto, settings, shapes[0][0])
    if used_hosts is not None and settings.hierarchical is True:
        flat_or_hierarchical.check(calibrated, used_hosts)
    elif used_hosts is not None:
        candidates = [(candidate, shapes) for candidate in layout.auto.candidates]
        plan.flat = [*plan.flat, *flat_or_hierarchical.flat_compressors(candidates, calibrated, settings, used_hosts)]
    plan.auto = start.selector(plan, calibrated)
    plan.selectors = [*plan.selectors, *[plan.auto] * len(shapes)]  # its buckets are the last ones
    plan.observers.append(plan.auto)


def _flat_compressors(settings: Settings, layout: ModelLayout, used_hosts: Hosts | None) -> list[Compressor]:
    """Compressors other than `auto` whose exchange is faster without sums within each host first.

    With deterministic operations, no times are measured, and there are none.
    """
    if used_hosts is None or settings.hierarchical != "auto" or determinism.is_enabled():
        return []
    candidates = []
    for g, group in enumerate(layout.param_groups):
        if not group.compressor.automatic:
            buckets = [layout.shapes_of(b) for b, bucket in enumerate(layout.buckets) if bucket.group == g]
            stages = group.compressor.stages
            candidates += [(stage, buckets) for i, stage in enumerate(stages) if stage not in stages[:i]]
    return flat_or_hierarchical.flat_compressors(candidates, None, settings, used_hosts)
