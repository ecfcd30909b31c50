"""Load, measures, and a cluster on one machine."""
