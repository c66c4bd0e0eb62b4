"""What `build.py sweep` runs: every kernel that fits on lists of problems, and the tuned table made of it."""
