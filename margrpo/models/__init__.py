"""Model families, and the interface they share."""
