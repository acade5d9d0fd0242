"""The output by which a run reports to `hvd-compress tune`; see `tuning` for its contents."""

# The environment variable that makes a run report.
VARIABLE = "HVD_COMPRESS_TUNE"
# The start of a line of the report. JSON follows.
MARK = "hvd_compress-tune: "
# When gradients are exchanged: this, "delay=1", or "local_steps=8", for example.
EACH_STEP = "each step"
