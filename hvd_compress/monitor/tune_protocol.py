"""How a run tells `hvd-compress tune` about itself: see `tuning` for what it tells."""

# The environment variable that asks for it.
VARIABLE = "HVD_COMPRESS_TUNE"
# With which such a line of output begins; JSON follows.
MARK = "hvd_compress-tune: "
