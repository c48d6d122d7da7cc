"""The way of a microbatch: feeder, choice of replicas, the steps of a stage."""
