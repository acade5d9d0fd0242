"""Measurements on one process that help to choose a compressor."""
