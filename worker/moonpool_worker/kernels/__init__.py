"""The engine's kernels behind one interface; `torch_backend` is the CPU backend and the reference."""
