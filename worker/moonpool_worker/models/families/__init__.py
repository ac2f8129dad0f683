"""One file per family; the registry finds them."""
