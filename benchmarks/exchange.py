"""Times the exchange of one step's gradients with every compressor.

    sudo python benchmarks/netlab.py --hosts 2 --rate 1gbit -- python benchmarks/exchange.py
    horovodrun -np 2 -H one:1,two:1 python benchmarks/exchange.py --model bert_base
    sudo python benchmarks/netlab.py --hosts 2 --workers 2 --rate 1gbit -- \
        python benchmarks/exchange.py --specs int8 --levels flat two-level auto

Runs under horovodrun. Each worker has different gradients with the shapes of the model. All methods are interleaved in
one run, and ratios are relative to stock Horovod without compression. A time is from a barrier until the worker has all
reduced gradients and its residuals are updated, on the slowest worker. Bytes are those that left the network interface
of the first host, as counted by the operating system: those of all its workers. side_by_side.py compares two versions.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from hvd_compress.tools.models import MODELS

STOCK = {"horovod none": "none", "horovod fp16": "fp16"}
LEVELS = {"auto": "auto", "flat": False, "two-level": True}
SPECS = [
    "none", "fp16", "bf16", "int8", "int4", "onebit", "topk:ratio=0.01", "block_topk:ratio=0.01",
    "randomk:ratio=0.01", "hybrid:ratio=0.01,bits=4", "powersgd:rank=2",
]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50", help="default: %(default)s")
    parser.add_argument("--specs", nargs="+", default=SPECS, metavar="SPEC", help="our compressors")
    parser.add_argument(
        "--levels",
        nargs="+",
        choices=sorted(LEVELS),
        default=["auto"],
        help="how our compressors cross between hosts of several workers (default: auto)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--bucket-bytes", type=int, help="default: that of DistributedOptimizer")
    parser.add_argument("--interface", help="whose bytes are counted (default: eth0, or lo where there is none)")
    return common.parse(parser)


def bytes_out(interface: str) -> int:
    """The bytes that have left a network interface so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): fields.split() for name, _, fields in (line.partition(":") for line in lines)}
    if interface not in counts:
        sys.exit(f"no network interface {interface} here, only {', '.join(counts)}: see --interface")
    return int(counts[interface][8])


def reset_peak() -> int:
    """Resets the peak memory of this process; returns its resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(what)


def main() -> None:
    args = arguments()
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd_compress as hvdc
    from hvd_compress.tools.recorded import gradients
    from hvd_compress.tools.timed_exchange import Method, and_wait, barrier

    hvdc.init()
    shapes = MODELS[args.model]()
    variables = [tf.Variable(value) for value in gradients(shapes, hvd.rank())]
    interfaces = Path("/proc/net/dev").read_text()
    interface = args.interface or ("eth0" if "eth0:" in interfaces else "lo")

    def stock(spec: str) -> Callable[[], Any]:
        compression = getattr(hvd.Compression, spec)

        @tf.function
        def reduce() -> list[tf.Tensor]:
            return [
                hvd.allreduce(v.value(), op=hvd.Average, compression=compression, name=f"stock_{spec}_{i}")
                for i, v in enumerate(variables)
            ]

        return and_wait(reduce)

    methods: dict[str, Callable[[], Any]] = {name: stock(spec) for name, spec in STOCK.items()}
    ours = {
        spec if args.levels == ["auto"] else f"{spec} {how}": Method(spec, variables, args.bucket_bytes, LEVELS[how])
        for spec in args.specs
        for how in args.levels
    }
    workers = hvd.local_size()
    methods |= {spec: method.run for spec, method in ours.items()}

    show = hvd.rank() == 0
    facts: dict[str, dict[str, float]] = {}
    for name, method in common.progress(list(methods.items()), "first steps", show):
        resident = reset_peak()
        start = time.perf_counter()
        method()
        first = time.perf_counter() - start
        method()
        barrier()
        sent = bytes_out(interface)
        method()
        barrier()
        facts[name] = {
            "first": first,
            "sent": bytes_out(interface) - sent,
            "memory": memory("VmHWM") - resident,
        }
        if name in ours:
            facts[name]["predicted_sent"] = workers * ours[name].plan.bytes_sent()[0]

    times = common.interleave(methods, args.rounds, barrier, show)
    # The slowest worker of each round counts.
    names = list(methods)
    slowest = hvd.allreduce(tf.constant([times[name] for name in names], tf.float64), op=hvd.Max, name="times")
    if hvd.rank() != 0:
        return
    seconds = dict(zip(names, slowest.numpy().tolist()))
    stats = {name: common.summary(row) for name, row in seconds.items()}
    baseline = stats["horovod none"]["median"]
    parameters = sum(math.prod(shape) for shape in shapes)
    rows = [
        [
            name, common.milliseconds(stats[name]), f"{baseline / stats[name]['median']:.2f}",
            f"{facts[name]['sent'] / 1e6:,.2f}", f"{facts[name]['memory'] / 2**20:,.0f}",
            f"{facts[name]['first']:.1f}",
        ]
        for name in names
    ]  # fmt: skip
    title = f"{args.model}, {parameters / 1e6:.2f}M parameters, {hvd.size()} workers {args.label}"
    columns = ["method", "ms, median (quartiles)", "times faster", "MB sent", "MiB memory", "first step s"]
    common.print_table(title, columns, rows)
    result = {
        "benchmark": "exchange", "model": args.model, "workers": hvd.size(), "label": args.label,
        "methods": {name: {**stats[name], **facts[name], "seconds": seconds[name]} for name in names},
    }  # fmt: skip
    common.save(args.json, result)


if __name__ == "__main__":
    main()
