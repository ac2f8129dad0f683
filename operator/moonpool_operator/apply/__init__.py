"""Effects: server-side apply under one field manager, status, Events, and calls to workers and the store."""
