"""Which peers there are: gossip of records, failure detection, directory, relays."""
