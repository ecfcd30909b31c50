"""The worker's HTTP routes. Thin: they parse, call, and answer; errors are translated in `errors` alone."""
