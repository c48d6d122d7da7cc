"""`python -m peer`, the same as `swarmnet`."""

from peer.cli import main

if __name__ == "__main__":
    main()
