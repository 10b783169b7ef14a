"""PyTorch's own test machinery, applied to the device."""
