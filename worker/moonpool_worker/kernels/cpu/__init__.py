"""Kernels in C++ for CPUs with AVX-512 and bfloat16 products; see docs/performance.md."""
