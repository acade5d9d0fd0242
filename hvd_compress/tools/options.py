"""Options that several subcommands have."""

from __future__ import annotations

import click

from ..engine.layout import BUCKET_BYTES
from . import units

SPECS = (
    "none", "fp16", "bf16", "int8", "int4", "onebit", "topk:ratio=0.01", "block_topk:ratio=0.01",
    "randomk:ratio=0.01", "hybrid:ratio=0.01,bits=4", "powersgd:rank=2",
)  # fmt: skip

compressors = click.option(
    "--compressor", "-c", "specs", type=units.SPEC, multiple=True, default=SPECS,
    help="Instead of all; may be repeated.",
)  # fmt: skip
bucket_bytes = click.option(
    "--bucket-bytes", type=units.BYTES, default=BUCKET_BYTES, help="Of a bucket.  [default: 25MiB]"
)


def with_none(specs: tuple[str, ...]) -> tuple[str, ...]:
    """The compressors, each once; no compression, with which the others are compared, comes first."""
    return tuple(dict.fromkeys(["none", *specs]))
