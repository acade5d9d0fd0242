"""Builds and installs Horovod for the TensorFlow of a Python environment.

Uses the standard library only, so that `hvd-compress horovod` works right after `pip install hvd_compress`, and
scripts/setup_env.py can import it from a clone. Nothing is imported here.
"""
