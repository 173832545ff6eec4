"""Implementations of `kvtier.policy.Policy`, one file each; loaded by name."""
