"""How near posteriors are to each other, and whether chains have converged."""
