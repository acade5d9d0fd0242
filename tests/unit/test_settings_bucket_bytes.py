"""HVD_COMPRESS_BUCKET_BYTES."""

import pytest

from hvd_compress.engine.settings import BUCKET_BYTES, resolve_bucket_bytes


def test_the_environment_counts_where_nothing_is_said(monkeypatch):
    monkeypatch.delenv("HVD_COMPRESS_BUCKET_BYTES", raising=False)
    assert resolve_bucket_bytes(None) == BUCKET_BYTES == 25 * 2**20
    monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", " 4096 ")
    assert resolve_bucket_bytes(None) == 4096
    assert resolve_bucket_bytes(100) == 100
    monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", "")
    assert resolve_bucket_bytes(None) == BUCKET_BYTES


@pytest.mark.parametrize("text", ["0", "-1", "25MB", "1.5"])
def test_what_is_no_number_is_said(monkeypatch, text):
    monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", text)
    with pytest.raises(ValueError, match="HVD_COMPRESS_BUCKET_BYTES must be a whole number from 1 on, got"):
        resolve_bucket_bytes(None)
