"""Checks, when imported, that TensorFlow and Horovod are installed; errors say what to do."""

import importlib
from importlib.util import find_spec

if find_spec("tensorflow") is None:
    raise ImportError("hvd_compress needs TensorFlow 2.15 or later: pip install tensorflow")
if find_spec("horovod") is None:
    raise ImportError("hvd_compress needs Horovod built for your TensorFlow: hvd-compress horovod install")
try:
    importlib.import_module("horovod.tensorflow")
except ImportError as error:
    raise ImportError(
        "hvd_compress needs Horovod built with HOROVOD_WITH_TENSORFLOW=1 for the installed TensorFlow; "
        f"this one does not load ({str(error).splitlines()[0]}): hvd-compress horovod install"
    ) from error
