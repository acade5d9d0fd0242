"""What a network costs."""

from __future__ import annotations

import dataclasses
import math
import numbers


@dataclasses.dataclass(frozen=True)
class Link:
    """A rank's connection to the others.

    Sending m bytes takes alpha + m * beta, and summing them where they arrive m * gamma (Thakur, Rabenseifner
    and Gropp 2005, section 3; there the symbols are the same). What shapes a link, or a switch's buffer, may let
    through the first bytes after a pause at once (a token bucket): they take no time beyond alpha.

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
        for name, unit in (
            ("alpha", "seconds"),
            ("beta", "seconds"),
            ("gamma", "seconds"),
            ("burst", "bytes"),
        ):
            value = getattr(self, name)
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"Link: {name} must be a finite number of {unit} from 0 on, got {value!r}")

    def carry(self, nbytes: float) -> float:
        """Seconds for so many bytes after a pause, without those per message."""
        return max(0.0, nbytes - self.burst) * self.beta

    @classmethod
    def of_rate(cls, bits_per_second: float, latency: float = 0.0) -> Link:
        """The link of this rate, with `latency` seconds per message.

        Raises:
            ValueError: The rate is not above 0.
        """
        if not bits_per_second > 0:
            raise ValueError(f"Link: the rate must be above 0 bits per second, got {bits_per_second!r}")
        return cls(latency, 8.0 / bits_per_second)
