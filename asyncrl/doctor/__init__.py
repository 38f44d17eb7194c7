"""`asyncrl doctor`: whether this machine, and a recipe on it, can work; each finding with its remedy. Imports nothing heavy."""
