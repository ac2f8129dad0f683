"""The worker's HTTP server: the OpenAI API, and what the operator, the gateway and Prometheus ask."""
