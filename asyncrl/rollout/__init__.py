"""Rollouts: engines that write tokens, environments that use them, rewards that judge them."""
