"""The replay buffer: admission bounds staleness, selection keeps groups whole, nothing leaves without a reason."""
