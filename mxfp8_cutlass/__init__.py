"""MXFP8 grouped GEMM for Mixture-of-Experts training and inference: a code generator and a Python runtime."""

from __future__ import annotations
