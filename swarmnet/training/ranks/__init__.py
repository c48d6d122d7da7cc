"""Several ranks of one machine behind one stage: tensor parallelism and FSDP."""
