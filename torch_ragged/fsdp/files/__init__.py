"""Scratch files of tiers, read and written as a whole or mapped into memory. They know neither parameters nor optimizers."""
