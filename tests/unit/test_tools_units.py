"""Numbers with units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.tools import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_count, "25.6M", 25_600_000),
        (units.parse_count, "1.2k", 1200),
        (units.parse_count, "7", 7),
        (units.parse_count, "1e6", 10**6),
        (units.parse_rate, "10gbit", 10e9),
        (units.parse_rate, "2.5 Gbit/s", 2.5e9),
        (units.parse_rate, "100Mbps", 100e6),
        (units.parse_rate, "1Gb/s", 1e9),
        (units.parse_rate, "10g", 1e10),
        (units.parse_rate, "10G", 1e10),
        (units.parse_rate, "10Gbit/s", 1e10),
        (units.parse_rate, "10Gbps", 1e10),
        (units.parse_rate, "500m", 5e8),
        (units.parse_rate, "9600bit", 9600),
        (units.parse_seconds, "50us", 50e-6),
        (units.parse_seconds, "120 ms", 0.12),
        (units.parse_seconds, "1.5s", 1.5),
        (units.parse_seconds, "10min", 600),
        (units.parse_seconds, "0", 0),
        (units.parse_bytes, "25MiB", 25 * 2**20),
        (units.parse_bytes, "10MB", 10**7),
        (units.parse_bytes, "4096", 4096),
    ],
)
def test_parse(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (units.parse_count, "lots", "'lots' is not a number such as 25600000 or 25.6M"),
        (units.parse_count, "0", "'0' is not a whole number from 1 on"),
        (units.parse_count, "1.5", "'1.5' is not a whole number from 1 on"),
        (units.parse_count, "-3", "'-3' is not a number"),
        (units.parse_rate, "10GB/s", "'10GB/s' is not a rate in bits per second, such as 10gbit"),
        (units.parse_rate, "10G/s", "'10G/s' is not a rate in bits per second"),
        (units.parse_rate, "10", "'10' is not a rate in bits per second"),
        (units.parse_rate, "0gbit", "'0gbit' is not a rate of a network"),
        (units.parse_seconds, "50", "'50' is not a time such as 50us"),
        (units.parse_seconds, "1e999s", "'1e999s' is too large"),
        (units.parse_bytes, "25mib", "'25mib' is not a size such as 10MB or 25MiB"),
        (units.parse_bytes, "0", "'0' is not a size from 1 byte on"),
    ],
)
def test_what_is_no_number_is_one_line(parse, text, message):
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@given(st.floats(1e-6, 900.0))
def test_seconds_come_back(value):
    assert units.parse_seconds(units.show_seconds(value)) == pytest.approx(value, rel=6e-3)


@given(st.floats(1e3, 9e11))
def test_rates_come_back(value):
    assert units.parse_rate(units.show_rate(value)) == pytest.approx(value, rel=6e-3)


def test_show():
    assert units.show_bytes(102_400_000) == "102 MB"
    assert units.show_bytes(999.9999e3) == "1 MB"
    assert units.show_count(25_600_000) == "25.6M"
    assert (units.show_seconds(0), units.show_seconds(1234.0)) == ("0 s", "1234 s")
