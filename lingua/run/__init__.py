"""What every app needs around its loop: start, state, description, samples, receipt, records."""
