"""The CUDA build of torch over libraries of our own, which compute nothing: `make cuda-api`."""
