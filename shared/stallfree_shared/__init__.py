"""What the router and the worker both speak. Imports neither of them, and never torch."""
