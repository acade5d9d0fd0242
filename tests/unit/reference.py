"""What the tests compare with: NumPy only, in float64 wherever rounding matters, nothing of the package."""

import math

import numpy as np

QUANTIZE_BLOCK, ONEBIT_BLOCK = 256, 1024
FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)  # TensorFlow's kernels flush what is smaller to zero


def vector(kind, n, seed=0):
    """A float32 vector [n] of one of `KINDS`."""
    rng = np.random.default_rng([seed, n])
    normal = rng.standard_normal(n)
    with np.errstate(under="ignore"):
        return {
            "normal": lambda: normal,
            "heavy": lambda: rng.standard_t(1.5, n),
            "zeros": lambda: np.zeros(n),
            "constant": lambda: np.full(n, normal[0]),
            "sparse": lambda: np.where(rng.random(n) < 0.03, normal, 0.0),
            "ties": lambda: rng.integers(-3, 4, n),
            "offset": lambda: 5.0 + rng.random(n),
            "far offset": lambda: 1e6 + 2e-3 * rng.random(n) - 1e-3,
            "negative": lambda: -rng.random(n) - 0.25,
            "mixed scale": lambda: normal * 10.0 ** rng.uniform(-20, 20, n),
            "layers": lambda: normal * 10.0 ** np.repeat(rng.uniform(-6, 2, n // 97 + 1), 97)[:n],
            "denormal": lambda: normal * 1e-40,
            "tiny": lambda: normal * 1e-30,
            "huge": lambda: rng.uniform(-1e38, 1e38, n),
        }[kind]().astype(np.float32)


KINDS = [
    "normal", "heavy", "zeros", "constant", "sparse", "ties", "offset", "far offset", "negative", "mixed scale",
    "layers", "denormal", "tiny", "huge",
]  # fmt: skip


# Sizes


def num_kept(ratio, n):
    """ratio * n rounded up, but not for the float's own rounding error; at least one."""
    product = ratio * n
    nearest = round(product)
    return max(1, nearest if abs(product - nearest) < 1e-9 * max(1.0, product) else math.ceil(product))


def block_of(n, largest=QUANTIZE_BLOCK):
    """The documented block length: the largest, or n rounded up to 8 where that is less."""
    return min(largest, -(-n // 8) * 8)


def index_bytes(n, k):
    """The documented size of k of n indices."""
    pages = 2 * k + (4 * -(-n // 65536) if n > 65536 else 0)
    bitmap = -(-n // 64) * 8 if n <= 1024 else -(-n // 1024) * 128
    return min(pages, bitmap)


def row_bytes(n, k):
    """The documented size of one index of a strided block."""
    rows = -(-n // k)
    return 1 if rows <= 256 else 2 if rows <= 65536 else 4


def quantized_bytes(n, bits):
    """The documented size of n values of so many bits."""
    block = block_of(n)
    return -(-n // block) * (block * bits // 8 + 8)


def wire_bytes(compressor, shape):
    """The formula of each docstring."""
    n = math.prod(shape)
    if n == 0:
        return 0
    name = compressor.name
    if name == "none":
        return 4 * n
    if name in ("fp16", "bf16"):
        return 2 * n
    if name == "quantize":
        return quantized_bytes(n, compressor.bits)
    if name == "onebit":
        block = block_of(n, ONEBIT_BLOCK)
        return -(-n // block) * (block // 8 + 4)
    if name in ("hadamard", "int2"):
        return -(-n // 64) * 18
    if name == "powersgd":
        rows, columns, rank = matrix_of(shape, compressor.rank)
        return 4 * min(n, rank * (rows + columns))
    k = num_kept(compressor.ratio, n)
    if name == "topk":
        return 4 * k + index_bytes(n, k)
    if name == "randomk":
        return 4 * k
    if name == "block_topk":
        return k * (4 + row_bytes(n, k))
    if name == "hybrid":
        return k * row_bytes(n, k) + quantized_bytes(k, compressor.bits)
    assert name == "block_sparse"
    grid = block_grid(shape, compressor.block)
    if grid is None:
        return 4 * k + index_bytes(n, k)
    m = grid[0] * grid[1]
    k = num_kept(compressor.ratio, m)
    return 4 * k * compressor.block**2 + index_bytes(m, k)


# What compressors compute


def blocks(flat, largest=QUANTIZE_BLOCK):
    """The blocks of a vector, the last without any padding."""
    block = block_of(len(flat), largest)
    return [flat[i : i + block] for i in range(0, len(flat), block)]


def steps(flat, bits, stochastic=False):
    """The documented distance of levels for each element, in float64."""
    intervals = 2**bits - 1 if not stochastic else max(1, 2**bits - 2)
    parts = [b.astype(np.float64) for b in blocks(flat)]
    return np.concatenate([np.full(len(b), (b.max() - b.min()) / intervals) for b in parts])


def nearest_levels(flat, bits):
    """`flat` rounded to the nearest of its levels, and which of these are clear (not halfway) cases."""
    step = steps(flat, bits)
    position = flat.astype(np.float64) / np.where(step > 0, step, 1.0)
    clear = np.abs(position - np.floor(position) - 0.5) > 1e-3
    values, start = [], 0
    for b in blocks(flat):
        at = slice(start, start + len(b))
        base = np.rint(position[at].min())
        code = np.clip(np.rint(position[at]) - base, 0, 2**bits - 1)
        values.append((code + base) * step[at])
        start += len(b)
    return np.where(step > 0, np.concatenate(values), flat), clear


def largest_per_block(flat):
    """For each element the largest magnitude of its block."""
    return np.concatenate([np.full(len(b), np.abs(b.astype(np.float64)).max()) for b in blocks(flat)])


def signs_and_means(flat):
    """Every element as its sign (+1 for zero) times the mean magnitude of its block."""
    return np.concatenate(
        [np.where(b < 0, -1.0, 1.0) * np.abs(b.astype(np.float64)).mean() for b in blocks(flat, ONEBIT_BLOCK)]
    )


def rotated_blocks(flat):
    """The blocks of 64 elements, the last padded with zeros, times a symmetric Hadamard matrix; [blocks, 64]."""
    q = np.ones([4, 4]) / 2 - np.eye(4)
    return np.pad(flat.astype(np.float64), (0, -len(flat) % 64)).reshape(-1, 64) @ np.kron(q, np.kron(q, q))


def strided_rows(flat, k):
    """For each of k strided blocks the row of its first largest magnitude."""
    return np.array([int(np.argmax(np.abs(flat[j::k]))) for j in range(k)])


def int2_steps(flat):
    """The documented distance of the levels of `int2` for each element, before it is rounded, in float64."""
    parts = [flat[i : i + 64].astype(np.float64) for i in range(0, len(flat), 64)]
    return np.concatenate([np.full(len(b), (max(b.max(), 0.0) - min(b.min(), 0.0)) / 3) for b in parts])


def matrix_of(shape, rank):
    """Rows, columns and rank of a tensor as the matrix with the smallest sum of sides; a vector is one row."""
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) > 1, max(1, len(shape)))]
    rows, columns = min(cuts, key=sum)
    return rows, columns, min(rank, rows, columns)


def block_grid(shape, block):
    """Rows and columns of blocks of a tensor seen as a matrix, None where they do not fit."""
    if len(shape) < 2 or math.prod(shape[:-1]) % block or shape[-1] % block:
        return None
    return math.prod(shape[:-1]) // block, shape[-1] // block


def mix(x):
    """The 32-bit finalizer of MurmurHash3, in Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


# Bounds


def usable(flat, step):
    """Where levels so far apart can be computed with in float32; other blocks decode to zero."""
    return ((step > 2.0**-119) | (step == 0)) & (step < 2.0**126) & (largest_per_block(flat) + step < FLOAT32_MAX)


def assert_error_is_bounded(compressor, x, y, relative=2.0**-22):
    """Asserts that `y`, the decoded `x`, is as close as the compressor's docstring promises.

    `relative` is how far rounding of `y` itself may go, of the largest value concerned.
    """
    original, shape = x, x.shape
    x, y = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    if x.size == 0:
        return
    assert np.isfinite(y).all()
    error = np.abs(x - y)
    flat = original.astype(np.float32).ravel()
    # What is flushed to zero, anywhere on the way, adds to the error.
    rounding = relative * largest_per_block(flat) + 2 * SMALLEST_NORMAL
    total, energy = np.sum(error**2), np.sum(x**2)
    squares = x.size * (relative * np.abs(x).max() + 2 * SMALLEST_NORMAL) ** 2 + relative * energy
    name = compressor.name
    if name == "none":
        assert (error <= SMALLEST_NORMAL).all()
    elif name == "fp16":
        inside = np.abs(x) <= 65504
        assert (error <= np.maximum(2.0**-11 * np.abs(x), 2.0**-25) + rounding)[inside].all()
    elif name == "bf16":
        assert (error <= 2.0**-8 * np.abs(x) + rounding).all()
    elif name == "quantize" and compressor.rounding == "nearest":
        assert (error <= np.abs(x) * (1 + relative) + rounding).all()
        if compressor.clip is None:
            step = steps(flat, compressor.bits)
            assert (error <= step / 2 + rounding)[usable(flat, step)].all()
    elif name == "quantize":
        step = steps(flat, compressor.bits, stochastic=True)
        assert (error <= step + rounding)[usable(flat, step)].all()
    elif name == "onebit":
        expected = sum(np.sum(b**2) - np.sum(np.abs(b)) ** 2 / len(b) for b in blocks(x, ONEBIT_BLOCK))
        assert abs(total - expected) <= 1e-5 * energy + squares
    elif name == "int2":
        assert (error <= np.abs(x) * (1 + relative) + rounding).all()
        step = int2_steps(flat)
        assert (error <= 0.53 * step + rounding)[usable(flat, step)].all()
    elif name == "hadamard":
        share = 0.81 - 1e-3  # the scale is a bfloat16
        magnitudes = np.abs(rotated_blocks(x)).sum(1)
        assert total <= (1 + 1e-5) * energy - share * np.sum(magnitudes**2) / 64 + squares
    elif name == "randomk":
        k = num_kept(compressor.ratio, x.size)
        size = np.array([len(x[j::k]) for j in range(k)])[np.arange(x.size) % k]
        sent = np.abs(x - size * x) if compressor.unbiased else 0.0
        assert (np.minimum(np.abs(error - np.abs(x)), np.abs(error - sent)) <= size * rounding).all()
        assert np.count_nonzero(y) <= k
    elif name == "hybrid":
        assert (error <= np.abs(x) * (1 + relative) + rounding.max()).all()
        assert np.count_nonzero(y) <= num_kept(compressor.ratio, x.size)
    elif name == "powersgd":
        rows, columns, rank = matrix_of(shape, compressor.rank)
        if rank * (rows + columns) >= rows * columns:
            assert (error <= rounding.max()).all()
            return
        singular = np.linalg.svd(x.reshape(rows, columns), compute_uv=False)
        best = np.sum(singular[rank:] ** 2)  # Eckart and Young 1936
        assert (1 - 1e-5) * best - squares <= total <= energy + squares
        assert np.linalg.matrix_rank(y.reshape(rows, columns), 1e-2 * singular[0]) <= rank
    else:
        n, k = x.size, num_kept(compressor.ratio, x.size)
        factor = 1 - k / n
        if name == "block_topk":
            # Two magnitudes that share their leading bits may be mistaken for each other.
            factor = 1 - (1 - 2.0**-13) / -(-n // k)
        elif name == "block_sparse" and block_grid(shape, compressor.block):
            m = math.prod(block_grid(shape, compressor.block))
            factor = 1 - num_kept(compressor.ratio, m) / m
        assert total <= factor * energy + squares


def queue(ready, seconds):
    """When the last bucket has crossed, where each waits for its gradients and for the one before."""
    free = 0.0
    for at, long in zip(ready, seconds):
        free = max(free, at) + long
    return free


def queue_after(waits, seconds):
    """As `queue`, where gradients of one bucket are there so long after those of the one before."""
    return queue(np.cumsum(waits), seconds)
