"""Compares the calibrated cost model with measured times, for every compressor, collective and bucket size.

    sudo python benchmarks/netlab.py --hosts 2 --rate 1gbit -- python benchmarks/prediction.py
    horovodrun -np 4 -H one:1,two:1,three:1,four:1 python benchmarks/prediction.py

Runs under horovodrun. Calibrates first, then exchanges one bucket at a time, with every collective that its compressor
can use. Buckets of one size are interleaved. A time is from a barrier until the slowest worker has the sum and its
residual; it is the mean of the middle half of the rounds, because small messages take one or two time slices of the
scheduler, and the median would jump between the two. Before each exchange the network pauses, as before the first
bucket of a step, so that the burst that a shaped link lets through does not depend on the exchange before. The error is
(predicted - measured) / measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np

SPECS = ["none", "int8", "int4", "onebit", "block_topk:ratio=0.01", "hybrid:ratio=0.01,bits=4"]
SIZES = [2**16, 2**20, 2**23, 25 * 2**20, 100 * 2**20]
# Buckets up to this size are timed more often, by this factor.
SMALL, ROUNDS_OF_SMALL = 2**20, 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", nargs="+", default=SPECS, metavar="SPEC", help="our compressors")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=SIZES,
        metavar="BYTES",
        help="of gradient (default: 64 KB to 100 MB)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    return common.parse(parser)


def exchange(spec: str, pattern: str, nbytes: int) -> Callable[[], Any]:
    """The exchange of one bucket of this size, with residuals."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd_compress as hvdc
    from hvd_compress.compressors.base import no_seeds
    from hvd_compress.exchange import choice
    from hvd_compress.exchange.group import Group
    from hvd_compress.exchange.local_input import LocalInput
    from hvd_compress.exchange.volume import LARGEST
    from hvd_compress.tools.timed_exchange import and_wait

    compressor = hvdc.Compression.parse(spec)
    (collective,) = [c for c in choice.FLAT if c.name == pattern]
    owners = hvd.size() if pattern == "scatter_reduce" else 1
    elements = nbytes // 4
    count = owners * -(-elements // (LARGEST * owners))
    size = -(-elements // count)
    random = np.random.default_rng(hvd.rank())
    pieces = [tf.Variable(random.standard_normal(size).astype(np.float32)) for _ in range(count)]
    keep = compressor.error_feedback
    variables = [tf.Variable(tf.zeros([size])) for _ in range(count)] if keep else []
    name = "".join(c if c.isalnum() else "_" for c in f"{spec}_{pattern}_{nbytes}")
    group = Group(hvd.global_process_set, name)

    @tf.function(autograph=False)
    def run() -> Any:
        residuals: list[Any] = [r.value() for r in variables] or [None] * count
        share = LocalInput([[p.value()] for p in pieces], residuals, 1.0, keep, no_seeds())
        result = collective.reduce(compressor, share, 1.0 / hvd.size(), group)
        for variable, value in zip(variables, result.residuals):
            variable.assign(value)
        return result.chunks

    return and_wait(run)


def main() -> None:
    args = arguments()
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd_compress as hvdc
    from hvd_compress.common.host_memory import keep_freed_memory
    from hvd_compress.cost.measure_links import midmean, rest
    from hvd_compress.tools.timed_exchange import barrier

    hvd.init()
    keep_freed_memory()
    show = hvd.rank() == 0
    start = time.perf_counter()
    calibration = hvdc.calibrate(args.specs)
    seconds = time.perf_counter() - start
    model = calibration.model()
    cases = [(spec, pattern) for spec in args.specs for pattern in model.patterns(spec)]
    rows = []

    # Until the shaped link allows a burst again.
    pause = 1.2 * max(link.burst * link.beta for link in calibration.links.values())

    def begin() -> None:
        rest(pause)
        barrier()

    for size in args.sizes:
        runs = {}
        for spec, pattern in common.progress(cases, f"first {size} bytes", show):
            run = runs[spec, pattern] = exchange(spec, pattern, size)
            run()
            run()
        rounds = args.rounds * (ROUNDS_OF_SMALL if size <= SMALL else 1)
        times = common.interleave(runs, rounds, begin, show=show)
        for (spec, pattern), own_times in times.items():
            slowest = hvd.allreduce(tf.constant(own_times, tf.float64), op=hvd.Max, name="times").numpy()
            predicted = model.predict(spec, size, pattern=pattern)
            rows.append((spec, pattern, size, midmean(slowest), predicted))
    if not show:
        return
    print(calibration)
    print(f"calibrated in {seconds:.1f} s")
    errors = [predicted.total / measured - 1.0 for *_, measured, predicted in rows]
    table = [
        [
            f"{spec}, {pattern}", f"{size / 2**20:.3g}", f"{measured * 1e3:.2f}", f"{predicted.total * 1e3:.2f}",
            f"{predicted.wire * 1e3:.2f}", f"{100 * error:+.0f}%",
        ]
        for (spec, pattern, size, measured, predicted), error in zip(rows, errors)
    ]  # fmt: skip
    title = f"one bucket, {hvd.size()} workers {args.label}"
    columns = ["compressor, pattern", "MiB", "measured ms", "predicted ms", "of it wire", "error"]
    common.print_table(title, columns, table)
    sizes = sorted(abs(error) for error in errors)
    within = sum(error <= 0.35 for error in sizes) / len(sizes)
    print(f"median error {100 * statistics.median(sizes):.0f}%, {100 * within:.0f}% of them within 35%")
    common.save(
        args.json,
        {
            "benchmark": "prediction", "workers": hvd.size(), "label": args.label, "calibration_seconds": seconds,
            "cases": [
                {
                    "spec": spec, "pattern": pattern, "bytes": size, "measured": measured,
                    "predicted": {
                        "encode": predicted.encode, "wire": predicted.wire, "decode": predicted.decode,
                    },
                }
                for spec, pattern, size, measured, predicted in rows
            ],
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
