"""For all tests."""

import os

# Triton reads it when it is first imported, by whatever test that may be: kernels then run here, without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
