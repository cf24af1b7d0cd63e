"""Checks of the contract on the user's own machine: `isogemm verify`. Tests and benchmarks use the same comparisons."""
