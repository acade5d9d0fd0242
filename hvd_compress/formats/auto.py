"""Defaults of `compressors.auto`, for predictions without TensorFlow."""

# What it chooses from.
CANDIDATES = ("none", "int8", "int4", "quantize:bits=2")
# The share of a bucket's energy that a step must let through.
TARGET = 0.01
# By how much, as a share, the exchange may take longer if all of the gradient then gets through.
MAX_SLOWDOWN = 0.02
