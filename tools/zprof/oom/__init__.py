"""Running out of memory: what failed, who held what, and the changes that would have made room."""
