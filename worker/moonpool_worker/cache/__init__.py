"""The three tiers of cached KV. ``kv_cache.KVCache`` is the only door to them.

This package imports nothing here: the L3 client's process loads ``store_tier`` and must stay free of torch.
"""
