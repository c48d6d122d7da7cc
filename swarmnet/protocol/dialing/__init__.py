"""The addresses that peers name, and which of them are dialled."""
