"""Weight sync: what changed, in checkpoint coordinates, proved on both ends."""
