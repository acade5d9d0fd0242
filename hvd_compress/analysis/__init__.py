"""Measurements in one process that help to choose a compressor."""
