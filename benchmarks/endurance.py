"""Checks a long training with `auto` for growing memory, retracing and ranks that drift apart.

    horovodrun -np 2 python benchmarks/endurance.py --json endurance.json

Runs under horovodrun. Trains a small network on random data, which differs between ranks. In addition to the
choices of `auto`, all buckets switch to the next candidate every `--switch-every` steps, on all ranks, so that all
candidates and all transitions between them occur many times. Every `--check-every` steps, the resident memory of
each rank and the checksum of its weights are recorded. Ends with status 1 if weights differed or a function was
traced again.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from typing import Any

import common

SPEC = "auto:candidates=(none|int8|int4|hybrid:ratio=0.01,bits=4)"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument(
        "--switch-every", type=int, default=250, metavar="STEPS", help="default: %(default)s; 0 for never"
    )
    parser.add_argument("--check-every", type=int, default=100, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--spec", default=SPEC, help="compression (default: %(default)s)")
    return common.parse(parser)


def force(plan: Any, turn: int) -> None:
    """Switches every bucket of `auto` to the candidate of this turn; on all ranks in the same step."""
    choice = plan.auto.state.choice
    choice.assign([turn % len(plan.auto.auto.candidates)] * choice.shape[0])


def main() -> int:
    args = arguments()
    import horovod.tensorflow as hvd
    import numpy as np
    import psutil
    import tensorflow as tf
    from tensorflow import keras

    import hvd_compress as hvdc
    from hvd_compress.common import tracing

    tracing.can_forget_traces = lambda: False  # all candidates are traced at once, for `force`

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(256), keras.layers.Dense(32)]
    model = keras.Sequential([keras.layers.Input([256]), *layers])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(1e-4), compression=args.spec)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(hvd.rank())
    x, target = (tf.constant(random.normal(size=[4096, n]).astype(np.float32)) for n in (256, 32))

    @tf.function
    def step(start: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[start : start + 32]) - target[start : start + 32]))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    process, reducer = psutil.Process(os.getpid()), optimizer._hvdc.reducer
    samples: list[dict[str, Any]] = []
    turns = 0
    for i in common.progress(range(args.steps), "steps", hvd.rank() == 0):
        step(tf.constant(i * 32 % 4064))
        if args.switch_every and (i + 1) % args.switch_every == 0 and reducer.last_plan("a switch").auto:
            turns += 1
            force(reducer.last_plan("a switch"), turns)
        if (i + 1) % args.check_every == 0:
            weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
            samples.append({"step": i + 1, "rss": process.memory_info().rss, "weights": zlib.crc32(weights)})
    traces = step.experimental_get_tracing_count()
    plans = [(len(plan.trace_indices), sum(plan.trace_indices.values())) for plan in reducer.plans.values()]
    selector = reducer.last_plan("the end").auto
    switches = int(np.sum(selector.state.switches)) if selector else 0
    ranks = hvd.allgather_object((samples, traces, plans), name="endurance")
    drifted = [s[0]["step"] for s in zip(*(rank[0] for rank in ranks)) if len({r["weights"] for r in s}) > 1]
    traced = [(rank[1], rank[2]) for rank in ranks]
    if hvd.rank() == 0:
        rows = []
        for rank, (samples, count, _) in enumerate(ranks):
            rss = [sample["rss"] / 2**20 for sample in samples]
            late = rss[len(rss) // 2 :]
            per_step = np.polyfit(np.arange(len(late)) * args.check_every, late, 1)[0] if len(late) > 1 else 0.0
            rows.append(
                [
                    str(rank),
                    *(f"{value:.1f}" for value in (rss[0], max(rss), rss[-1], per_step * 1e4)),
                    str(count),
                ]
            )
        columns = [
            "rank",
            f"MiB, step {args.check_every}",
            "most",
            "last",
            "per 10,000 steps, 2nd half",
            "traces",
        ]
        common.print_table(f"{args.steps} steps, {hvd.size()} workers {args.label}", columns, rows)
        print(f"all buckets switched {turns} times, and by auto itself {switches} buckets")
        print(f"weights differed at steps {drifted}" if drifted else "weights are the same to the bit at all checks")
        names = ("steps", "switch_every", "check_every", "spec", "label")
        common.save(
            args.json,
            {
                "benchmark": "endurance", "workers": hvd.size(), **{name: vars(args)[name] for name in names},
                "forced_switches": turns, "own_switches": switches, "drifted": drifted,
                "ranks": [{"traces": count, "plans": plans, "samples": samples} for samples, count, plans in ranks],
            },
        )  # fmt: skip
    return int(bool(drifted) or any(count != 1 or plans != [(1, 0)] for count, plans in traced))


if __name__ == "__main__":
    sys.exit(main())
