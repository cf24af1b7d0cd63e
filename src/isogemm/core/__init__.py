"""What every family uses: operators, plans, launches, device properties, settings, errors and the dispatch log."""
