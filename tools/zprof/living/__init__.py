"""Looking at processes that run: their stacks, their memory, and what their recording says now."""
