"""The cost of encoding and decoding."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """Seconds of one compressor's kernels, per byte of float32 gradient, and per call.

    Attributes:
        call: Seconds per call, for a gradient of any size.
        encode: Seconds per byte encoded, with the residual.
        decode: Seconds per byte of the decoded sum, for any number of payloads.
        decode_rank: Seconds per byte of the decoded sum and per payload.
    """

    call: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    decode_rank: float = 0.0

    def encoding(self, nbytes: float) -> float:
        """Seconds to encode `nbytes` of gradient."""
        return self.call + nbytes * self.encode

    def decoding(self, nbytes: float, ranks: float) -> float:
        """Seconds to decode payloads of `ranks` ranks and sum them to `nbytes` of gradient."""
        return self.call + nbytes * (self.decode + ranks * self.decode_rank)
