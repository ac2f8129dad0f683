"""The contract between the people who write custom resources, the operator and the workers.

Everything that two programs must agree on lives here and nowhere else: the typed custom resources, the KV namespace
function, the geometry of a cached block, and the names of labels, annotations, ports and child objects.
"""
