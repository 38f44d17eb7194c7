"""Training: packed batches, one global denominator, FSDP2 over any number of ranks."""
