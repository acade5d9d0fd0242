"""Settings of `auto` that are also used without TensorFlow."""

# What it chooses from.
CANDIDATES = (
    "none", "int8", "int4", "int2", "hybrid:ratio=0.1,bits=4", "hybrid:ratio=0.05,bits=4",
    "hybrid:ratio=0.01,bits=4", "powersgd:rank=4", "powersgd:rank=1",
)  # fmt: skip
# What it looks for.
OBJECTIVES = ("progress", "step")
# With objective="step", the share of the energy that a step must let through.
TARGET = 0.01
# By how much, as a share, the exchange may take longer if all of the gradient then gets through.
MAX_SLOWDOWN = 0.02
# A candidate is tried for so many steps; a choice stays for longer.
TRIAL_STEPS = 2
