"""The cost of encoding and decoding."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """Seconds of one compressor's kernels, per byte of float32 gradient, and per call."""

    call: float = 0.0  # per call, for a gradient of any size
    encode: float = 0.0  # per byte encoded, with the residual
    decode: float = 0.0  # per byte of the decoded sum, for any number of payloads
    decode_rank: float = 0.0  # per byte of the decoded sum and per payload

    def encoding(self, nbytes: float) -> float:
        """Seconds to encode `nbytes` of gradient."""
        return self.call + nbytes * self.encode

    def decoding(self, nbytes: float, ranks: float) -> float:
        """Seconds to decode payloads of `ranks` ranks and sum them to `nbytes` of gradient."""
        return self.call + nbytes * (self.decode + ranks * self.decode_rank)
