"""Numbers with units, as people write them: 25.6M, 10gbit, 50us, 25MiB.

`parse_*` raises ValueError for other text. `show_*` writes such numbers: 12.3 ms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from .link import LATENCY

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {
    "": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip
# Other values are typing errors.
_SLOWEST, _FASTEST = 1.0, 1e18  # bits per second
_LONGEST = 24 * 3600.0


def parse_count(text: str) -> int:
    """A whole number: 25600000, 25.6M."""
    value = _parse(text.lower(), _COUNTS, text, "a number such as 25600000 or 25.6M (K, M, G)")
    if value < 1 or value != round(value):
        raise ValueError(f"{text!r} is not a whole number from 1 on")
    return round(value)


def parse_rate(text: str) -> float:
    """Bits per second: 10gbit, 500 Mbit/s, 1Gbps, 10g."""
    # Gb/s is Gbit/s; a capital B would be bytes.
    bits = re.sub(r"(?<![a-zA-Z])([kKmMgGtT]?)b(?=ps$|/s$)", r"\1bit", text.strip())
    short = re.sub(r"(?<=bit)(/s|ps)$", "", bits)
    value = _parse(short.lower(), _RATES, text, "a rate in bits per second, such as 10gbit or 500mbit")
    if not _SLOWEST <= value <= _FASTEST:
        raise ValueError(f"{text!r} is not a rate of a network: give 1 bit to 1e6 Tbit per second")
    return value


def parse_seconds(text: str) -> float:
    """Seconds: 50us, 120ms, 1.5s, 10min; 0 needs no unit."""
    if text.strip() == "0":
        return 0.0
    value = _parse(text.lower(), _SECONDS, text, "a time such as 50us, 120ms, 1.5s or 10min")
    if value > _LONGEST:
        raise ValueError(f"{text!r} is longer than 24h")
    return value


def parse_link(text: str) -> tuple[float, float]:
    """The bits per second and the seconds per message of a link: 1gbit+50us; without a latency, it is 50 us."""
    # A rate ends in "bit", "bps", "/s" or "g"; a "+" may also belong to an exponent.
    rate, *latency = re.split(r"(?<=[a-zA-Z])(?<![eE])\s*\+", text.strip(), maxsplit=1)
    return parse_rate(rate), parse_seconds(latency[0]) if latency else LATENCY


def parse_bytes(text: str) -> int:
    """Bytes: 26214400, 25MiB, 10MB."""
    value = _parse(text, _BYTES, text, "a size such as 10MB or 25MiB")
    if value < 1:
        raise ValueError(f"{text!r} is not a size from 1 byte on")
    return round(value)


def _parse(text: str, units: Mapping[str, float], original: str, what: str) -> float:
    match = re.fullmatch(_NUMBER + r"\s*(\D*)", text.strip())
    if match is None or match.group(2) not in units:
        raise ValueError(f"{original!r} is not {what}")
    value = float(match.group(1)) * units[match.group(2)]
    if not math.isfinite(value):
        raise ValueError(f"{original!r} is too large")
    # 25.6 * 1e6 is 25600000.000000004 or so.
    return round(value) if value >= 1 and abs(value - round(value)) < 1e-6 * value else value


def show_rate(bits_per_second: float) -> str:
    """Bits per second as text: 10 Gbit/s."""
    return _show(bits_per_second, {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1.0})


def show_bytes(nbytes: float) -> str:
    """Bytes as text: 102 MB."""
    return _show(nbytes, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def show_seconds(seconds: float) -> str:
    """Seconds as text: 12.3 ms."""
    return _show(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6}) if seconds else "0 s"


def show_count(count: float) -> str:
    """A number as text: 25.6M."""
    return _show(count, {"G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}).replace(" ", "")


def _show(value: float, units: Mapping[str, float]) -> str:
    """The value in the largest of the units, which come in falling order, that is not larger than it."""
    *_, smallest = units
    name = next((name for name, size in units.items() if value >= 0.9995 * size), smallest)
    number = f"{value / units[name]:.3g}"
    if "e" in number:
        number = f"{value / units[name]:.0f}"
    return f"{number} {name}".rstrip()
