"""The compressors of a plan and the bytes of its steps. Not for use in a graph."""

from __future__ import annotations

import math

from ..exchange import uncompressed
from .compression_report import BucketReport
from .plan import Plan


def report(plan: Plan) -> list[BucketReport]:
    """The compressor of each bucket and the reason for it, then those of the embeddings."""
    layout = plan.layout
    reports = [
        BucketReport(4 * sum(map(math.prod, layout.shapes_of(b))), compressor.spec)
        for b, compressor in enumerate(plan.compressors())
    ]
    if plan.auto is not None:
        for b, chosen in zip(layout.auto_buckets, plan.auto.report(int(plan.state.step))):
            reports[b] = chosen
    for i, table in zip(layout.sparse, layout.embeddings):
        reports.append(BucketReport(4 * math.prod(table.shape), table.compressor.spec, rows_of=layout.paths[i]))
    return reports


def bytes_sent(plan: Plan) -> tuple[int, int]:
    """The bytes that each rank sends per step: as configured, and without compression.

    Allreduces count as in a ring, and IndexedSlices as in the last step. Without compression, Horovod sends the values
    and row numbers of IndexedSlices, including duplicates. If `hvdc.init()` has found several hosts of several workers,
    these are the bytes that leave a host, divided by its workers (except for IndexedSlices).
    """
    layout, ranks, hosts = plan.layout, plan.settings.process_set.size(), plan.all_hosts

    def nbytes(members: list[int]) -> int:
        return sum(math.prod(layout.shapes[i]) * layout.dtypes[i].size for i in members)

    rest = layout.uncompressed_members
    compressed = [i for group in layout.param_groups for i in group.layout.tensors.members]
    sent, stock = (uncompressed.bytes_sent(nbytes(some), ranks) for some in (rest, [*compressed, *rest]))
    if hosts is not None:  # a ring leaves each host once
        sent, stock = sent // hosts.workers, stock // hosts.workers
    for b, compressor in enumerate(plan.compressors()):
        shapes = plan.shapes_of(b, compressor)
        collective = plan.collective(compressor, shapes)
        if hosts is None:
            sent += collective.bytes_sent(compressor, shapes, ranks)
        else:
            sent += collective.leaving_host(compressor, shapes, hosts.count, hosts.workers) // hosts.workers
    counts = plan.state.embedding_counts
    for table, last in zip(layout.embeddings, [] if counts is None else counts.numpy().tolist()):
        rows = table.bytes_sent(*last)
        sent, stock = sent + rows[0], stock + rows[1]
    return sent, stock
