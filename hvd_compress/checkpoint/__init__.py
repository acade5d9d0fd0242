"""Residuals on disk: what of a plan (`plan_state`), in which files (`files`), read by whom (`resume`), saved by all."""
