"""`asyncrl correction`: what the named corrections are, and what one of them would do to recorded data."""
