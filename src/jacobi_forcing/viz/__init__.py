"""Pictures of what happened: one prompt's sweeps, and a run's report. Reads results; only figures need matplotlib."""
