"""Parity of zhooks with plain training: the models, the oracle, the matrix of cells, the adversities."""
