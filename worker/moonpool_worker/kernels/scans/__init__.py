"""Recurrences in plain torch, one file each, in their chunked form: no Python per token of a prompt."""
