"""What `convergence.py` is made of: tasks, cells (one run each), tables and plots."""
