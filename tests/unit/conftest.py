"""Unit tests: one process, no hvd.init()."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.pop("HVD_COMPRESS", None)

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit",  # the same examples each time
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("deep", settings.get_profile("unit"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))
