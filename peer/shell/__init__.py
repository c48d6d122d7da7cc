"""What a shell has of the commands beside `--help`: completion, and a page for `man`."""
