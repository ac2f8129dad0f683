"""Decisions: pure functions from what was observed to what is to be done. No I/O, no clock of their own."""
