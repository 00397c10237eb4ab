"""Decoders: what to propose, the loop that sweeps, and the public entry."""
