"""What the tiers hold, told to whoever routes requests: KV events over ZMQ in vLLM's wire format."""
