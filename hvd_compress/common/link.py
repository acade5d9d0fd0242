"""What a link of a network costs."""

from __future__ import annotations

import dataclasses
import math

from . import checks
from .error_text import error_text

# Seconds per message, where nobody says it: that of a switched Ethernet.
LATENCY = 50e-6


@dataclasses.dataclass(frozen=True)
class Link:
    """A rank's connection to the others.

    Sending m bytes takes alpha + m * beta, and summing them at the receiver takes m * gamma (Thakur, Rabenseifner and
    Gropp 2005, section 3, with the same symbols). A traffic shaper (a token bucket) or a switch's buffer may let the
    first bytes after a pause pass at once: they take no time beyond alpha.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte.
        gamma: Seconds per byte that a collective reduces.
        burst: Bytes that pass at once after a pause.

    Raises:
        ValueError: One of them is negative or not finite.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    burst: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not checks.is_number(value) or not 0 <= value < math.inf:
                unit = "bytes" if name == "burst" else "seconds"
                raise ValueError(f"Link: {name} must be a finite number of {unit} from 0 on, got {error_text(value)}")

    def carry(self, nbytes: float) -> float:
        """Seconds that so many bytes take after a pause, without those per message."""
        return max(0.0, nbytes - self.burst) * self.beta

    @classmethod
    def of_rate(cls, bits_per_second: float, latency: float = 0.0) -> Link:
        """A link of this rate, with `latency` seconds per message.

        Raises:
            ValueError: The rate is not above 0.
        """
        if not bits_per_second > 0:
            raise ValueError(f"Link: the rate must be above 0 bits per second, got {bits_per_second!r}")
        return cls(latency, 8.0 / bits_per_second)
