"""L3: a Mooncake store behind a client process that may hang, crash or lie without hurting the engine.

On the engine's side ``client`` keeps the process alive, ``fetches`` read, ``puts`` write, ``rates`` say what is worth
it, and ``tier`` is the door to them; ``process`` is the child's side. None of them may import torch.
"""
