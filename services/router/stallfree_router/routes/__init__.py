"""The HTTP side of the router: thin handlers, the OpenAI shapes, and the one place where errors become answers."""
