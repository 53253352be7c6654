"""Parts: the share of a state that one client holds in memory, its index, and the server that gives it to others."""
