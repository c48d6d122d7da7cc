"""What people see of a run: screen, metrics, web page."""
