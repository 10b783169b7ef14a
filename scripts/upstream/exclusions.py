"""Tests of PyTorch's own files that pass on the CPU and not on the device, by file, as patterns of
fnmatch, with the reason."""

from __future__ import annotations

CPU_ONLY = "the test expects the CPU's own class or function on every device but CUDA"
QUANTIZED = "quantized tensors are refused by name"
SPARSE = "sparse layouts are refused by name"

EXCLUSIONS: dict[str, dict[str, str]] = {
    "test_view_ops.py": {"TestOldViewOps.test_flatten": QUANTIZED, "TestOldViewOps.test_ravel": QUANTIZED},
    "test_shape_ops.py": {"TestShapeOps.test_flip_float32": QUANTIZED},
    "test_type_promotion.py": {"TestTypePromotion.test_sparse_*": SPARSE},
    "test_torch.py": {
        "TestTorchDeviceType.test_broadcast_fn_map*": "Tensor.map_ is for CPU tensors in PyTorch",
        "TestTorchDeviceType.test_grad_scaler_deprecated_warning": CPU_ONLY,
        "TestTorchDeviceType.test_grad_scaling_state_dict": CPU_ONLY,
        "TestTorchDeviceType.test_grad_scaling_unscale_sparse_float32": SPARSE,
        "TestTorchDeviceType.test_memory_format_empty_like": SPARSE,
        "TestTorchDeviceType.test_tensor_storage_type_*": CPU_ONLY,
    },
}
