"""Jacobi trajectories: collecting and storing them."""
