"""What must be settled before any test module is imported."""

import ctypes
import os
import signal

try:
    from hypothesis import settings
except ImportError:  # a GPU machine that runs the tests of kernels alone may not have it
    pass
else:
    # How long an example takes says more about the machine than about the code.
    settings.register_profile("pagewire", deadline=None)
    settings.load_profile("pagewire")

# A shell has what it starts in the background ignore SIGINT, and every child would inherit that: tests that interrupt
# one would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton's kernels run in its interpreter. It must know before anything imports triton, and transformers
# does; whether there is a driver is quickly seen, while asking torch would cost every run its import.
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ["TRITON_INTERPRET"] = "1"
