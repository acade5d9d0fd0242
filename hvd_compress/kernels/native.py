"""Operations in C++ encode and decode whole buckets, and rows of tables, in one pass (sources: the folder `native`).

They compute the same as the kernels that XLA compiles, up to rounding: XLA contracts a * b + c where the processor can,
and the C++ compiler never does, so that all processors give the same bits. All ranks must use the same kind
(`engine.agreement` checks it). No kernel has to be compiled before the first step, and a bucket is a few operations in
the graph. They run on the CPU. XLA's kernels are used on hosts with a GPU, if the library was not built, and if
`HVD_COMPRESS_KERNELS=xla`.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from ..common import devices
from ..common.error_text import error_text, one_line
from ..formats.base import Shape, num_kept, size_of

VARIABLE = "HVD_COMPRESS_KERNELS"
KINDS = ("native", "xla")

# The numbers of `Method` in native/ops.cc.
METHODS = ("quantize", "onebit", "block_topk", "hybrid", "topk", "hadamard", "fp16", "bf16", "int2")


# The operation that was added last; one that changes gets another name. A library without it is older than the package.
NEWEST = "hvd_compress_encode_table_rows"


class NativeFormat(NamedTuple):
    """What the operations need to know of a compressor."""

    method: str  # of METHODS
    bits: int = 0  # of each value, where there is a choice
    ratio: float = 1.0  # the share of elements that is kept, of sparse formats
    stochastic: bool = False  # rounding
    salt: int = 0  # folded into the seed of stochastic rounding

    def kept(self, n: int) -> int:
        """How many of `n` elements are kept."""
        return num_kept(self.ratio, n)


class NativeEncoded(NamedTuple):
    """The result of `encode`."""

    payload: tf.Tensor  # uint8
    residuals: list[tf.Tensor]  # float32, in the chunks' shapes; empty unless wanted
    finite: tf.Tensor  # bool scalar


@functools.lru_cache(maxsize=1)
def library() -> Any | None:
    """The operations; None if the library was not built, or does not load."""
    return _load()[0]


@functools.lru_cache(maxsize=1)
def _load() -> tuple[Any | None, str]:
    """The operations, and why there are none."""
    path = Path(__file__).parent / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        return None, "are not built: install hvd_compress where there is a C++ compiler"
    try:
        operations = tf.load_op_library(str(path))
    except (OSError, tf.errors.OpError) as error:
        return None, f"do not load ({one_line(str(error))}): install hvd_compress again"
    if not hasattr(operations, NEWEST):
        return None, "are older than the package: install hvd_compress again"
    return operations, ""


def missing() -> str:
    """Why there is no library, and what to do; empty if there is one."""
    return _load()[1]


def kind() -> str:
    """The kernels in use, "native" or "xla".

    Raises:
        ValueError: `HVD_COMPRESS_KERNELS` names neither, or the native kernels, which are not there.
    """
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted and wanted not in KINDS:
        raise ValueError(f"the environment variable {VARIABLE} must be 'native' or 'xla', got {error_text(wanted)}")
    if wanted == "native" and library() is None:
        raise ValueError(f"{VARIABLE}=native, but the native kernels {missing()}")
    if wanted:
        return wanted
    return "xla" if library() is None or devices.has_gpu() else "native"


def in_use(native_format: NativeFormat | None) -> NativeFormat | None:
    """The format, if there are native operations for it and they are in use."""
    return native_format if native_format is not None and kind() == "native" else None


def encode(
    format: NativeFormat,
    nbytes: int,
    chunks: Sequence[Sequence[tf.Tensor]],
    residuals: Sequence[tf.Tensor | None],
    decay: float,
    keep: bool,
    seed: tf.Tensor,
    first_chunk: int = 0,
    before: tf.Tensor | bool = True,
    flagged_bytes: int | None = None,
) -> NativeEncoded:
    """Encodes gradient + decay * residual of each chunk into one payload.

    Args:
        format: How.
        nbytes: The length of the payload without its flag.
        chunks: The pieces of each chunk, which are read where they are: float32, of static shapes.
        residuals: One for each chunk, float32 or bfloat16; or None for all of them.
        decay: The residuals' factor.
        keep: Whether new residuals are wanted.
        seed: Of stochastic rounding, int32 scalar.
        first_chunk: The index of the first chunk, folded into the seed.
        before: The flag is up only if this is true, too.
        flagged_bytes: The length of the payload with its flag; None for no flag.
    """
    pieces = [piece for of_chunk in chunks for piece in of_chunk]
    shapes = [shape_of(of_chunk) for of_chunk in chunks]
    old = [tf.cast(residual, tf.float32) for residual in residuals if residual is not None]
    with tf.device("CPU"):
        payload, new, finite = _operations().hvd_compress_encode(
            pieces=pieces,
            residuals=old,
            seed=seed if format.stochastic else 0,
            before=before,
            K=len(chunks) if keep else 0,
            pieces_of=[len(of_chunk) for of_chunk in chunks],
            kept=[format.kept(size_of(shape)) for shape in shapes],
            decay=decay,
            first_chunk=first_chunk,
            nbytes=nbytes,
            flagged_bytes=nbytes if flagged_bytes is None else flagged_bytes,
            **_attributes(format),
            stochastic=format.stochastic,
            salt=format.salt,
        )
    payload.set_shape([nbytes if flagged_bytes is None else flagged_bytes])
    finite.set_shape([])
    return NativeEncoded(payload, [_shaped(r, shape) for r, shape in zip(new, shapes)], finite)


def decode(
    format: NativeFormat,
    nbytes: int,
    payloads: Sequence[tf.Tensor],
    shapes: Sequence[Shape],
    scale: tf.Tensor,
    shares: int = 1,
    joined: bool = False,
    summed: bool = False,
) -> list[tf.Tensor]:
    """The sum of the payloads of all ranks, in their order, times `scale`: float32 chunks of these shapes.

    Args:
        format: How they were encoded.
        nbytes: The length of a payload without its flag.
        payloads: uint8 vectors of at least this length: of all ranks for the first share of the chunks, then for the
            second one, ...
        shapes: Those of the chunks.
        scale: float32 scalar.
        shares: The chunks are divided into so many shares of equal length.
        joined: Whether the result is one tensor, all chunks end to end.
        summed: Whether, of two ranks, the second payload is the sum of both, modulo 256.
    """
    sizes = [size_of(shape) for shape in shapes]
    with tf.device("CPU"):
        chunks = _operations().hvd_compress_decode(
            payloads=list(payloads),
            scale=scale,
            C=1 if joined else len(sizes),
            shares=shares,
            summed=summed,
            sizes=sizes,
            kept=[format.kept(size) for size in sizes],
            nbytes=nbytes,
            **_attributes(format),
        )
    return [_shaped(chunk, shape) for chunk, shape in zip(chunks, [(sum(sizes),)] if joined else shapes)]


class RowForm(NamedTuple):
    """How the rows of a table are encoded, see `compressors.rows`."""

    columns: int
    blocks: int  # of a row
    block: int  # columns of a block, the last of which is padded; a multiple of 8
    number_bytes: int  # of the row's number


def encode_rows(
    format: NativeFormat, form: RowForm, numbers: tf.Tensor, values: tf.Tensor, seed: tf.Tensor, chunk: int = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Encodes rows with `quantize`, `onebit` or `hadamard`.

    Args:
        format: How.
        form: The form of a row.
        numbers: The rows' numbers, int64 [n].
        values: float32 [n, columns].
        seed: Of stochastic rounding, int32 scalar.
        chunk: Folded into the seed.

    Returns:
        The payload, uint8 [n, bytes of a row], and what it leaves out, float32 [n, columns].
    """
    with tf.device("CPU"):
        payload, residuals = _operations().hvd_compress_encode_table_rows(
            numbers=numbers,
            values=values,
            seed=seed if format.stochastic else 0,
            stochastic=format.stochastic,
            chunk=chunk,
            salt=format.salt,
            **form._asdict(),
            **_attributes(format),
        )
    residuals.set_shape(values.shape)
    return payload, residuals


def decode_rows(format: NativeFormat, form: RowForm, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The inverse of `encode_rows`: the rows' numbers, int64 [n], and their values, float32 [n, columns]."""
    attributes = {**form._asdict(), **_attributes(format)}
    with tf.device("CPU"):
        numbers, values = _operations().hvd_compress_decode_table_rows(payload=payload, **attributes)
    numbers.set_shape([payload.shape[0]])
    values.set_shape([payload.shape[0], form.columns])
    return numbers, values


def shape_of(pieces: Sequence[tf.Tensor]) -> Shape:
    """The shape of a chunk: that of its only piece, or of all of them end to end."""
    if len(pieces) == 1:
        return tuple(pieces[0].shape.as_list())
    return (sum(piece.shape.num_elements() for piece in pieces),)


def subtract(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """The difference of two uint8 vectors, modulo 256."""
    with tf.device("CPU"):
        difference = _operations().hvd_compress_subtract(a=a, b=b)
    difference.set_shape(a.shape)
    return difference


def _operations() -> Any:
    operations = library()
    assert operations is not None, "ask `kind` before"
    return operations


def _attributes(format: NativeFormat) -> dict[str, int]:
    return {"method": METHODS.index(format.method), "bits": format.bits, "threads": devices.intra_op_threads()}


def _shaped(flat: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    flat.set_shape([size_of(tuple(shape))])
    return flat if len(shape) == 1 else tf.reshape(flat, shape)
