"""What a run leaves for people: plots and reports."""
