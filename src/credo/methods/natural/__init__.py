"""Natural-gradient variational inference: VOGN, OGN and IVON."""
