"""Times the exchange of an embedding's gradient, as rows and as a dense tensor.

    sudo python benchmarks/netlab.py --hosts 2 --rate 1gbit -- python benchmarks/embedding.py
    horovodrun -np 2 -H one:1,two:1 python benchmarks/embedding.py --rows 1000000 --tokens 16384

Runs under horovodrun. Each worker looks up different tokens, distributed by Zipf's law like words. All methods are
interleaved in one run. A time is from a barrier until the table is updated (plain SGD), on the slowest worker. Bytes
are those that left the network interface, as counted by the operating system.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from exchange import bytes_out

SPECS = ["none", "fp16", "int8", "int4", "onebit"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="of the table (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="of a worker's batch (default: %(default)s)")
    parser.add_argument("--exponent", type=float, default=1.1, help="of Zipf's law (default: %(default)s)")
    parser.add_argument("--specs", nargs="+", default=SPECS, metavar="SPEC", help="our compressors")
    parser.add_argument("--rounds", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--interface", help="whose bytes are counted (default: eth0, or lo where there is none)")
    return common.parse(parser)


def main() -> None:
    args = arguments()
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf

    from hvd_compress.compressors.namespace import Compression
    from hvd_compress.engine.reducer import Reducer
    from hvd_compress.engine.settings import Settings
    from hvd_compress.frontends.build import new_reducer
    from hvd_compress.tools.timed_exchange import and_wait, barrier

    hvd.init()
    rng = np.random.default_rng(hvd.rank())
    # Zipf's law over the rows of the table: the probability of the k-th most frequent is proportional to k **
    # -exponent.
    weights = np.arange(1, args.rows + 1) ** -args.exponent
    tokens = rng.choice(args.rows, args.tokens, p=weights / weights.sum())
    values = tf.Variable(rng.standard_normal((args.tokens, args.columns)).astype(np.float32))
    indices = tf.Variable(tokens.astype(np.int64))
    shape = [args.rows, args.columns]
    interface = args.interface or ("eth0" if "eth0:" in Path("/proc/net/dev").read_text() else "lo")

    def gradient() -> tf.IndexedSlices:
        return tf.IndexedSlices(values.value(), indices.value(), tf.constant(shape, tf.int64))

    def trained(reduce: Callable[[Any, Any], Any], dense: bool) -> Callable[[], Any]:
        table = tf.Variable(tf.zeros(shape))

        @tf.function(autograph=False)
        def step() -> Any:
            given = tf.convert_to_tensor(gradient()) if dense else gradient()
            reduced = reduce(given, table)
            if isinstance(reduced, tf.IndexedSlices):
                table.scatter_sub(tf.IndexedSlices(0.01 * reduced.values, reduced.indices))
            else:
                table.assign_sub(0.01 * reduced)
            return table[0, 0]

        return and_wait(step)

    def stock(name: str) -> Callable[[Any, Any], Any]:
        return lambda given, _: hvd.allreduce(given, op=hvd.Average, name=name)

    def ours(reducer: Reducer) -> Callable[[Any, Any], Any]:
        return lambda given, table: reducer([given], [table])[0]

    reducers = {spec: new_reducer(Settings(Compression.parse(spec))) for spec in args.specs}
    methods = {
        "horovod slices": trained(stock("slices"), dense=False),
        "horovod dense": trained(stock("dense"), dense=True),
        **{spec: trained(ours(reducer), dense=False) for spec, reducer in reducers.items()},
    }
    show = hvd.rank() == 0
    facts: dict[str, dict[str, float]] = {}
    for name, method in common.progress(list(methods.items()), "first steps", show):
        start = time.perf_counter()
        method()
        first = time.perf_counter() - start
        method()
        barrier()
        sent = bytes_out(interface)
        method()
        barrier()
        facts[name] = {"first": first, "sent": bytes_out(interface) - sent}
        if name in reducers:
            facts[name]["predicted_sent"] = reducers[name].bytes_sent()[0]

    times = common.interleave(methods, args.rounds, barrier, show)
    names = list(methods)
    slowest = hvd.allreduce(tf.constant([times[name] for name in names], tf.float64), op=hvd.Max, name="times")
    if hvd.rank() != 0:
        return
    seconds = dict(zip(names, slowest.numpy().tolist()))
    stats = {name: common.summary(row) for name, row in seconds.items()}
    baseline = stats["horovod slices"]["median"]
    rows = [
        [
            name, common.milliseconds(stats[name]), f"{baseline / stats[name]['median']:.2f}",
            f"{facts[name]['sent'] / 1e6:,.3f}", f"{facts[name]['first']:.1f}",
        ]
        for name in names
    ]  # fmt: skip
    distinct = len(np.unique(tokens))
    title = (
        f"table of {args.rows:,} x {args.columns}, {args.tokens:,} tokens, {distinct:,} rows on rank 0, "
        f"{hvd.size()} workers {args.label}"
    )
    columns = ["method", "ms, median (quartiles)", "times faster", "MB sent", "first step s"]
    common.print_table(title, columns, rows)
    result = {
        "benchmark": "embedding", "rows": args.rows, "columns": args.columns, "tokens": args.tokens,
        "exponent": args.exponent, "distinct": distinct, "workers": hvd.size(), "label": args.label,
        "methods": {name: {**stats[name], **facts[name], "seconds": seconds[name]} for name in names},
    }  # fmt: skip
    common.save(args.json, result)


if __name__ == "__main__":
    main()
