"""A transformer's encoder layer in one call each way."""
