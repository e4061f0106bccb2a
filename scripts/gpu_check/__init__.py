"""What `scripts/gpu-check` runs. Needs nothing but Python; PyTorch and CuPy are used where they are installed."""
