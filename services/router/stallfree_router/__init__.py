"""The router: speaks the OpenAI API, predicts each request's work, and sends it where it fits best. Never torch."""
