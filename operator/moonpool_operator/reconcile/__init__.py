"""One reconcile of one object: observe, plan, apply."""
