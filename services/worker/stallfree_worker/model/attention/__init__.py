"""Attention over the paged KV cache: one function with the arguments of a variable-length paged kernel, many backends.

A backend prepares what all layers of a step share (`prepare`), and then attends per layer. The compiled kernels for
CPUs have theirs inside the whole forward pass (`model.cpu`).
"""
