"""What a network costs."""

from __future__ import annotations

import dataclasses
import math
import numbers


@dataclasses.dataclass(frozen=True)
class Link:
    """A rank's connection to the others.

    Sending m bytes takes alpha + m * beta, and summing them where they arrive m * gamma (Thakur, Rabenseifner
    and Gropp 2005, section 3; there the symbols are the same).

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte.
        gamma: Seconds per byte that a collective reduces.

    Raises:
        ValueError: One of them is negative or not finite.
    """

    alpha: float
    beta: float
    gamma: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            value = getattr(self, name)
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"Link: {name} must be a finite number of seconds from 0 on, got {value!r}")

    @classmethod
    def of_rate(cls, bits_per_second: float, latency: float = 0.0) -> Link:
        """The link of this rate, with `latency` seconds per message.

        Raises:
            ValueError: The rate is not above 0.
        """
        if not bits_per_second > 0:
            raise ValueError(f"Link: the rate must be above 0 bits per second, got {bits_per_second!r}")
        return cls(latency, 8.0 / bits_per_second)
