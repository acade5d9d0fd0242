"""Times each kernel on one core, as a multiple of the time of `x + 1` on the same data in the same run.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --only int8 --piece 24576000

Kernels run as in a training step, in a tf.function, over chunks of a recorded gradient: native operations where they
are in use (`HVD_COMPRESS_KERNELS`), else compiled with XLA. The ratios depend on the version of TensorFlow, which is
part of the table's title, as the kind of the kernels is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common

# About the size of a chunk in training, and a multiple of the alignment of all these compressors.
PIECE = 1_024_000
# Columns of the matrix, for compressors of matrices.
COLUMNS = 512
# Name, compressor, number of ranks whose payloads are decoded (0: encode with a residual).
KERNELS = [
    ("residual + int8", "int8", 0),
    ("residual + int8, stochastic", "quantize:bits=8,rounding=stochastic", 0),
    ("residual + int4", "int4", 0),
    ("residual + quantize (2 bits)", "quantize:bits=2", 0),
    ("residual + hadamard (2 bits)", "hadamard", 0),
    ("residual + onebit", "onebit", 0),
    ("residual + block_topk 1%", "block_topk:ratio=0.01", 0),
    ("residual + hybrid 1%", "hybrid:ratio=0.01,bits=4", 0),
    ("residual + topk 10%", "topk:ratio=0.1", 0),
    ("residual + topk 1%", "topk:ratio=0.01", 0),
    ("residual + topk 0.1%", "topk:ratio=0.001", 0),
    ("residual + powersgd rank 1", "powersgd:rank=1", 0),
    ("residual + powersgd rank 4", "powersgd:rank=4", 0),
    ("decode powersgd rank 1", "powersgd:rank=1", 1),
    ("decode powersgd rank 4", "powersgd:rank=4", 1),
    ("decode int8 of 1 rank", "int8", 1),
    ("decode and sum int8 of 4 ranks", "int8", 4),
    ("decode and sum int4 of 4 ranks", "int4", 4),
    ("decode quantize (2 bits) of 1 rank", "quantize:bits=2", 1),
    ("decode hadamard (2 bits) of 1 rank", "hadamard", 1),
    ("decode and sum quantize (2 bits) of 4 ranks", "quantize:bits=2", 4),
    ("decode and sum hadamard (2 bits) of 4 ranks", "hadamard", 4),
    ("decode and sum onebit of 4 ranks", "onebit", 4),
    ("decode and sum block_topk 1% of 4 ranks", "block_topk:ratio=0.01", 4),
    ("decode and sum hybrid 1% of 4 ranks", "hybrid:ratio=0.01,bits=4", 4),
    ("decode and sum topk 1% of 4 ranks", "topk:ratio=0.01", 4),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=24 * PIECE, help="default: %(default)s")
    parser.add_argument("--piece", type=int, default=PIECE, help="elements at once (default: %(default)s)")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if args.piece < 1 or args.elements < args.piece or args.piece % COLUMNS:
        parser.error(f"--piece must be a multiple of {COLUMNS} and at most --elements")
    return args


def main() -> None:
    args = arguments()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import tensorflow as tf

    import hvd_compress as hvdc
    from hvd_compress.compressors import Seeds
    from hvd_compress.exchange import coding
    from hvd_compress.exchange.local_input import LocalInput
    from hvd_compress.kernels import native
    from hvd_compress.tools.recorded import gradients

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    count = args.elements // args.piece
    shapes = [(args.piece // COLUMNS, COLUMNS)] * count
    pieces, residuals = (
        [tf.constant(scale * gradient.reshape(-1)) for gradient in gradients(shapes, rank)]
        for rank, scale in ((0, 1.0), (1, 0.1))
    )
    seeds = Seeds(tf.constant(1), tf.constant(2))
    add_one = tf.function(lambda x: x + 1.0, jit_compile=True)

    matrices = [tf.reshape(piece, [-1, COLUMNS]) for piece in pieces]
    matrix_residuals = [tf.reshape(piece, [-1, COLUMNS]) for piece in residuals]

    def product(rank: int, transposed: bool, way: str) -> Callable[[], Any]:
        """A product with a thin matrix: the way of `kernels.linear` ("TensorFlow") or an alternative."""
        side = COLUMNS if transposed else args.piece // COLUMNS
        factor = tf.random.normal([rank, side], seed=rank)

        def multiply(matrix: Any) -> Any:
            if "vector" not in way:
                return tf.matmul(factor, matrix, transpose_b=transposed)
            vectors = tf.unstack(factor)
            return tf.stack([tf.linalg.matvec(matrix, v, transpose_a=not transposed) for v in vectors])

        one = tf.function(multiply, jit_compile=True) if "XLA" in way else multiply
        several = tf.function(lambda matrices: [one(matrix) for matrix in matrices])
        return lambda: several(matrices)

    def encoder(compressor: Any) -> Callable[[], Any]:
        inputs = (matrices, matrix_residuals) if compressor.per_tensor else (pieces, residuals)

        @tf.function
        def encode(chunks: Sequence[Any], residuals: Sequence[Any]) -> list[Any]:
            inputs = (LocalInput([[x]], [r], 1.0, True, seeds) for x, r in zip(chunks, residuals))
            shards = [coding.encode(compressor, local_input) for local_input in inputs]
            return [(shard.payload, shard.residuals) for shard in shards]

        return lambda: encode(*inputs)

    def decoder(compressor: Any, ranks: int) -> Callable[[], Any]:
        inputs = [LocalInput([[x]], [None], 1.0, False, seeds) for x in (matrices if compressor.per_tensor else pieces)]
        shards = [coding.encode(compressor, local_input) for local_input in inputs]
        payloads = [[tf.identity(shard.payload) for _ in range(ranks)] for shard in shards]
        shapes, scale = inputs[0].shapes, tf.constant(0.25)

        @tf.function
        def decode(payloads: Sequence[Any]) -> list[Any]:
            return [coding.decode(compressor, shapes, p, s.contexts, scale) for p, s in zip(payloads, shards)]

        return lambda: decode(payloads)

    @tf.function
    def baseline(pieces: Sequence[Any]) -> list[Any]:
        return [add_one(piece) for piece in pieces]

    functions: dict[str, Callable[[], Any]] = {"x + 1": lambda: baseline(pieces)}
    for name, spec, ranks in KERNELS:
        if args.only in name:
            compressor = hvdc.Compression.parse(spec)
            functions[name] = decoder(compressor, ranks) if ranks else encoder(compressor)
    for way in ("TensorFlow", "TensorFlow, vector by vector", "XLA", "XLA, vector by vector"):
        for rank in (1, 2, 4):
            for transposed, what in ((True, "M Q"), (False, "P M")):
                name = f"powersgd product {what} rank {rank}, {way}"
                if args.only in name:
                    functions[name] = product(rank, transposed, way)
    for function in common.progress(list(functions.values()), "compiling"):
        function()
        function()
    times = common.interleave(functions, args.rounds)
    stats = {name: common.summary(values) for name, values in times.items()}
    base = stats["x + 1"]["median"]
    rows = [
        [name, f"{s['median'] / base:.2f}", f"{s['low'] / base:.2f} to {s['high'] / base:.2f}",
         f"{s['median'] * 1e3:.1f}"]
        for name, s in stats.items()
    ]  # fmt: skip
    size = f"{count * args.piece / 1e6:.1f}M elements in {count} pieces"
    title = f"{size}, one core, TensorFlow {tf.__version__}, {native.kind()} kernels"
    common.print_table(title, ["kernel", "times x + 1", "quartiles", "ms"], rows)
    settings = {"elements": count * args.piece, "piece": args.piece}
    common.save(args.json, {"benchmark": "kernels", **settings, "kernels": stats})


if __name__ == "__main__":
    main()
