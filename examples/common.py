"""What the examples share: arguments, devices, and the report at the end."""

from __future__ import annotations

import argparse
import os

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_compress as hvdc


def arguments(description: str, script: str, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """A parser with the arguments that all examples have; each example adds its own."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"example: horovodrun -np 2 python examples/{script} --compression int8",
    )
    parser.add_argument(
        "--compression",
        type=_compressor,
        default="hybrid:ratio=0.01,bits=4",
        metavar="SPEC",
        help="none, fp16, int8, topk:ratio=0.01, ... (default: %(default)s)",
    )
    parser.add_argument("--batch-size", type=int, default=batch_size, help="images per worker (default: %(default)s)")
    parser.add_argument(
        "--lr",
        type=float,
        default=lr,
        help="learning rate per worker; it is multiplied by the number of workers (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser


def _compressor(spec: str) -> hvdc.Compressor:
    try:
        return hvdc.Compression.parse(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def share_devices() -> None:
    """Assigns this worker a GPU of its own, or its share of the machine's cores."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        gpu = gpus[hvd.local_rank()]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    else:
        cores = os.cpu_count() or 1
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // hvd.local_size()))


def report(
    *,
    data: str,
    steps: int,
    seconds: float,
    compression: hvdc.Compressor,
    accuracy: float | None = None,
    sent: tuple[int, int] | None = None,
) -> None:
    """Prints the results of the training on the first worker.

    Args:
        data: A description of the training data.
        steps: Steps of each worker.
        seconds: Seconds of all steps together.
        compression: The compressor.
        accuracy: Accuracy on the test images, from 0 to 1.
        sent: The result of the optimizer's `bytes_sent()`: bytes with and without compression.
    """
    if hvd.rank() != 0:
        return
    lines = {"workers": f"{hvd.size()}", "data": data}
    if accuracy is not None:
        lines["test accuracy"] = f"{accuracy:.2%}"
    lines["steps"] = f"{steps} in {seconds:.1f} s"
    lines["compressor"] = f"{compression}"
    if sent is not None:
        lines["sent per step"] = f"{sent[0]:,} bytes by each worker"
        lines["uncompressed"] = f"{sent[1]:,} bytes"
        lines["ratio"] = f"{sent[1] / sent[0]:.1f}"
    elif hvd.size() == 1:
        lines["sent per step"] = "0 bytes: there is only one worker"
    print("\n" + "\n".join(f"{name + ':':<15} {value}" for name, value in lines.items()), flush=True)
