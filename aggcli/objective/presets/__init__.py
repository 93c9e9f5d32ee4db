"""Every framework's aggregation as facts, and one function that turns facts, a batch and a layout into token weights.

The facts and their names never import torch; only `weights` does.
"""
