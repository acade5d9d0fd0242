"""Spec strings that tests run over: those of the register, subsets of them, and some with arguments of their own."""

from hvd_compress.formats.registry import FORMATS

EXAMPLES = [spec for cls in FORMATS.classes.values() for spec in cls.examples]
# Every compressor, with each argument that takes another way through the code. `dgc` is `topk` with momentum in front.
ALL = [spec for spec in EXAMPLES if not spec.startswith("dgc")]

# As Horovod's: they take any dtype and shape.
CASTS = ["none", "fp16", "bf16"]
# Their payloads can be summed.
SUMMABLE = [*CASTS, "randomk:ratio=0.1", "randomk:ratio=0.1,unbiased=true"]
# Their payloads are bytes.
PACKED = [spec for spec in ALL if spec not in SUMMABLE]
# They send indices.
INDEXED = [spec for spec in PACKED if spec.startswith(("topk", "block_topk", "hybrid", "block_sparse"))]
# Their payloads can be scatter-reduced, as they are of chunks of one size.
SCATTERED = [spec for spec in ALL if spec != "none" and not spec.startswith(("randomk", "block_sp", "powersgd"))]
# Of these, with a residual: one of each layout of bytes.
EXCHANGED = [
    "int8", "int4", "quantize:bits=3", "quantize:bits=4,clip=99", "onebit", "topk:ratio=0.01",
    "block_topk:ratio=0.05", "hybrid:ratio=0.05,bits=4",
]  # fmt: skip


def one_of_each(specs):
    """The first spec of each name; int8 and int4 are names of their own."""
    return list({spec.partition(":")[0]: spec for spec in reversed(specs)}.values())[::-1]


# One of each compressor, where its arguments make no difference.
ONE_EACH = one_of_each(ALL)

# Small models learn with them within a few steps.
TRAINED = [
    "none", "fp16", "bf16", "int8", "int4", "onebit", "topk:ratio=0.05", "randomk:ratio=0.1",
    "randomk:ratio=0.5,unbiased=true", "block_topk:ratio=0.05", "block_sparse:ratio=0.1,block=4",
    "hybrid:ratio=0.05,bits=4", "quantize:bits=3", "quantize:bits=8,rounding=stochastic",
    "quantize:bits=4,clip=99", "powersgd:rank=2",
]  # fmt: skip
# Of these, one of each kind: sent as it is, dense, sparse, both.
KINDS = ["none", "int8", "topk:ratio=0.1", "hybrid:ratio=0.1,bits=4"]
