"""The objective as pure functions of tensors: advantages, selection of tokens, loss."""
