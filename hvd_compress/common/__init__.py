"""Helpers for all folders: names of variables, argument checks, error text, tracing, host memory, devices."""
