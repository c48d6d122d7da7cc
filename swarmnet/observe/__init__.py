"""What happens in a run, as an onlooker sees it: events and what is, from the records of peers."""
