"""The engine decides: which tokens each step computes, and which KV blocks they use. It imports no torch."""
