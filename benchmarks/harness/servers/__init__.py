"""The servers that are measured, each started as its own users would start it."""
