"""The container's first process: it keeps L2's memory and starts the engine again when that crashes.

It must stay small and cannot be allowed to fail, so it imports nothing but a few modules of the standard library.
"""
