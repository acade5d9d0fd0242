"""What `auto` saves by compressing the rows of embeddings.

Rows are sent with one compressor (`Auto.for_rows`) or uncompressed. On a fast link, or where there are few of them,
they begin uncompressed: kernels would take longer to compile, and to run, than the link needs for the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ..cost import CostModel
from ..engine.embedding_table import EmbeddingTable


class RowSavings:
    """Predicts how much shorter a step is if rows are compressed.

    Args:
        tables: All embeddings of the plan. Those that `auto` does not decide on save nothing.
        model: The calibrated cost model.
        counts: `State.embedding_counts`; None if there are no embeddings.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], model: CostModel, counts: tf.Variable | None) -> None:
        self._tables, self._model, self._counts = tables, model, counts

    @property
    def any(self) -> bool:
        """Whether there are rows that may be compressed or not."""
        return any(table.automatic for table in self._tables)

    def at_most(self) -> float:
        """Seconds, if each gradient has as many rows as it may have."""
        return self._seconds([table.max_rows for table in self._tables], 1.0)

    def now(self, link: float) -> float:
        """Seconds, with the rows of the last step. Bytes take `link` times as long as when `model` was calibrated."""
        if self._counts is None:
            return 0.0
        ranks = self._model.ranks
        return self._seconds([rows / ranks for rows in self._counts.numpy()[:, 0].tolist()], link)

    def _seconds(self, rows: Sequence[float], link: float) -> float:
        """With so many rows of each rank, on average."""
        gather, ranks = self._model.topology.allgather, self._model.ranks
        saved = 0.0
        for table, count in zip(self._tables, rows):
            if table.automatic:
                gradient = 4.0 * count * table.columns
                kernels = self._model.cost_of(table.compressor)
                saved += link * (gather(count * table.uncompressed.rows.nbytes) - gather(count * table.rows.nbytes))
                saved -= kernels.encoding(gradient) + kernels.decoding(ranks * gradient, 1)
        return saved
