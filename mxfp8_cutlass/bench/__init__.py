"""Timing on a GPU, for `build.py bench`: workloads, peers, checks, tables and charts. Nothing else imports this."""
