"""The decoder for CPUs: the whole forward pass in compiled kernels, built from `services/worker/native` at install."""
