"""Clients of everything the operator talks to: the API server, Mooncake's master, workers and gateways."""
