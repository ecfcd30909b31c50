"""The GPU worker: tokens in, tokens out, by a Sarathi engine that never stalls a running decode."""
