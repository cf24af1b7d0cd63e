"""What every family stands on: device facts, environment, errors, launching and the dispatch log."""
