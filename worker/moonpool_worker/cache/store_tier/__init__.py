"""L3: a Mooncake store behind a client process that may hang, crash or lie without hurting the engine.

``tier`` is the engine's side, ``process`` the child's. Neither may import torch.
"""
