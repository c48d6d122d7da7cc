"""What happens when peers die, leave or come back: handover, lost samples, restart."""
