"""What the examples share: arguments, devices, and the report at the end. It is no example itself."""

from __future__ import annotations

import argparse
import os
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.monitor import end_summary


def arguments(
    description: str, script: str, batch_size: int, lr: float | None, inputs: str = "images", lr_default: str = ""
) -> argparse.ArgumentParser:
    """A parser with the arguments that all examples have; each example adds its own.

    Args:
        description: One sentence on what the example does.
        script: The name of its file.
        batch_size: Default of `--batch-size`.
        lr: Default of `--lr`.
        inputs: What a batch consists of.
        lr_default: If `lr` is None, what the example does then, for `--help`.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"example: horovodrun -np 2 python examples/{script} --compression int8",
    )
    parser.add_argument(
        "--compression",
        type=compressor,
        default="auto",
        metavar="SPEC",
        help="auto, none, fp16, int8, topk:ratio=0.01, ... (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=batch_size, help=f"{inputs} per worker (default: %(default)s)"
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=lr,
        help=f"learning rate per worker; it is multiplied by the number of workers (default: {lr_default or lr})",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser


def compressor(spec: str) -> hvdc.Compressor:
    """The type of arguments that are compressors: a wrong spec ends the script with one line."""
    try:
        return hvdc.Compression.parse(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def share_devices() -> None:
    """Assigns this worker a GPU, or its share of the machine's cores. Workers share GPUs if there are fewer."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        gpu = gpus[hvd.local_rank() % len(gpus)]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    else:
        cores = os.cpu_count() or 1
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // hvd.local_size()))


def report(
    distributed: Any,
    *sources: Any,
    data: str,
    steps: int,
    seconds: float,
    compression: hvdc.Compressor | str,
    metrics: dict[str, str] | None = None,
) -> None:
    """Prints the results of the training, and what stock Horovod would have cost, on the first worker.

    Args:
        distributed: The optimizer, or a tape with the settings of the training.
        sources: Only with a tape: the variables, as one list.
        data: A description of the training data.
        steps: Steps of each worker.
        seconds: Seconds of all steps together.
        compression: The compressor, or its name.
        metrics: Results by name, such as the accuracy on test images.
    """
    if hvd.rank() != 0:
        return
    lines = {"workers": f"{hvd.size()}", "data": data, **(metrics or {})}
    lines["steps"] = f"{steps} in {seconds:.1f} s"
    lines["compressor"] = f"{compression}"
    if hvd.size() == 1:
        lines["sent per step"] = "0 bytes: there is only one worker"
    else:
        report, sent = distributed.compression_report(*sources), distributed.bytes_sent(*sources)
        lines |= end_summary.exchange_lines(report, sent, steps, seconds)
        end_summary.leave_out_exchange()
    print("\n" + "\n".join(f"{name + ':':<15} {value}" for name, value in lines.items()), flush=True)


if __name__ == "__main__":
    raise SystemExit(
        "common.py holds what the examples share: run one of them, such as "
        "`horovodrun -np 2 python examples/keras_mnist.py --help`"
    )
