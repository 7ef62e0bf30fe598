"""Sums that do not depend on the number of ranks: of gradients by a fixed tree, of numbers exactly. Not on by default."""
