"""kopf handlers: each only says which object has to be looked at."""
