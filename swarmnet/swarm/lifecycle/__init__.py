"""The life of a peer, step by step: meet, choose a stage, serve it, move, stand by, depart."""
