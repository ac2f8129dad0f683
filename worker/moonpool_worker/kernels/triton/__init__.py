"""Triton kernels: one file per idea, bound to the `Kernels` protocol in `backend`."""
