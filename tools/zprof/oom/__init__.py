"""Running out of memory: what failed, who held what, and the changes that would have let it fit."""
