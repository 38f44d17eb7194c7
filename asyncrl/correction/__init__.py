"""Off-policy correction as pure functions of tensors."""
