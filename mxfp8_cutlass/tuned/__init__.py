"""Kernels that were fastest in a sweep: a table for each target, and how `select_kernel` reads it."""
